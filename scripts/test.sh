#!/usr/bin/env bash
# Builds and runs the whole test suite on a machine without a GPU; ends with `N passed, N failed, N skipped`.
#   scripts/test.sh                  everything
#   scripts/test.sh kernels          only the programs whose name matches; see `group` below
set -uo pipefail
cd "$(dirname "$0")/.."
only="${1:-}"
scripts/install.sh build test || exit 1
. scripts/test_lib.sh

# The configurations of the CPU device. w1: a warp is one thread, as users run it; w32: as on a GPU.
kernels="test_accumulate test_adamw test_attention test_classifier test_device test_embedding test_gelu test_layernorm test_matmul test_reductions"
group host    PRECISION=fp32 WARP=1 -- $(host_tests)
group kernels PRECISION=fp32 WARP=1 -- $(existing $kernels test_streams test_recompute test_gpt2_golden test_checkpoint)
group kernels PRECISION=bf16 WARP=1 -- $(existing $kernels test_recompute test_gpt2_golden)
group mpi     PRECISION=fp32 WARP=1 -- $(mpi_tests)
python_tests
group kernels PRECISION=fp32 WARP=32 -- $(existing $kernels test_device_warps)
group kernels PRECISION=bf16 WARP=32 -- $(existing $kernels test_recompute)
group sanitizers PRECISION=fp32 WARP=32 SANITIZE=address -- $(existing test_layernorm test_embedding test_gelu test_streams)
group sanitizers PRECISION=fp32 WARP=32 SANITIZE=thread -- $(existing test_streams test_gelu)
nvcc_builds
report
