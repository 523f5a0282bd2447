#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under 7 minutes: builds, kernel tests, golden tests, equality of 1, 2 and 4 ranks on one
# GPU, benchmarks, throughput beside ceilings measured in the same run; one table last. Needs nvcc and a driver. Uses what is there
# and says what it skipped: ranks need Open MPI, kernel tests need GoogleTest (or GTEST_DIR=a folder with include/ and lib/).
#   scripts/gpu_check.sh [FOLDER]     logs and table go to FOLDER (default build/gpu_check)
set -uo pipefail
cd "$(dirname "$0")/.."
out="${1:-build/gpu_check}"
mkdir -p "$out"
table="$out/table.txt"
: >"$table"
start=$SECONDS
budget=400   # seconds; what does not fit is skipped and said so

row() { printf '%-46s %s\n' "$1" "$2" >>"$table"; }
left() { echo $((budget - (SECONDS - start))); }
fits() { [ "$(left)" -ge "$2" ] && return 0; row "$1" "skipped: $(left) s left, it needs $2"; return 1; }
# check NAME SECONDS COMMAND...: one row, passed or failed, with the last line that it printed
check() {
  local name="$1" seconds="$2" log status
  shift 2
  fits "$name" 5 || return 1
  log="$out/$(echo "$name" | tr ' /,' '___').log"
  timeout -k 5 "$seconds" "$@" >"$log" 2>&1 </dev/null
  status=$?
  if [ $status -eq 0 ]; then row "$name" "passed"; else row "$name" "FAILED ($status): $(grep -iE 'error|fail' "$log" | head -1 | cut -c1-120)"; fi
  return $status
}

command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || { echo "error: no nvcc; install the CUDA Toolkit or add its bin folder to PATH" >&2; exit 1; }
command -v nvidia-smi >/dev/null || { echo "error: no nvidia-smi, so no NVIDIA driver is installed here" >&2; exit 1; }
row "date, commit" "$(date -u '+%Y-%m-%d %H:%M UTC'), $(git rev-parse --short HEAD 2>/dev/null || echo 'not a git checkout')"
row "GPU, driver" "$(nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader | head -1)"
row "nvcc" "$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"

gtest=()
if [ -n "${GTEST_DIR:-}" ]; then
  gtest=(GTEST="-I$GTEST_DIR/include -L$GTEST_DIR/lib -lgtest_main -lgtest -lpthread")
fi
build() { make -k -j"$(nproc)" DEVICE=cuda "$@"; }
tests="test_attention test_adamw test_classifier test_embedding test_gelu test_layernorm test_matmul test_reductions test_recompute test_gpt2_golden"
jobs_ok=1
for precision in fp32 bf16; do
  check "build train_gpt2 and bench_step, $precision" 150 build PRECISION=$precision \
    "build/cuda-$precision/train_gpt2" "build/cuda-$precision/bench_step" || jobs_ok=0
done
[ $jobs_ok -eq 1 ] || { cat "$table"; exit 1; }

# 1. kernels and the whole model against float64
if echo '#include <gtest/gtest.h>' | g++ -x c++ -fsyntax-only ${GTEST_DIR:+-I$GTEST_DIR/include} - 2>/dev/null; then
  for precision in fp32 bf16; do
    check "build tests, $precision" 150 build PRECISION=$precision "${gtest[@]}" $(for t in $tests; do echo "build/cuda-$precision/$t"; done)
    for t in $tests; do check "$t, $precision" 60 "build/cuda-$precision/$t"; done
  done
else
  row "kernel and golden tests" "skipped: no GoogleTest (set GTEST_DIR)"
fi

# 2. one rank, then several ranks on the one GPU through host memory: the same bits
python3 - "$out" <<'PY'
import array, random, sys
random.seed(1)
tokens = array.array("H", (random.randrange(50257) for _ in range(400000)))
header = array.array("i", [20240520, 1, len(tokens)] + [0] * 253)
for split in ("train", "val"):
    with open(f"{sys.argv[1]}/random_{split}.bin", "wb") as f:
        header.tofile(f); tokens.tofile(f)
PY
small=(--train-data "$out/random_train.bin" --val-every 0 --sample-every 0 --vocab 50257 --layers 5 --channels 128 --heads 2
       --seq-len 128 --micro-batch 2 --batch-tokens 2048 --steps 10 --clip 0.5 --weight-decay 0.1)
final() { grep '^final step' "$1" | tail -1; }
check "train, 1 rank, fp32" 60 build/cuda-fp32/train_gpt2 "${small[@]}"
one=$(final "$out/train__1_rank__fp32.log")
row "  final" "$one"
if command -v mpirun >/dev/null; then
  . scripts/mpi_env.sh
  for layout in "2 2 0 1f1b 0" "2 1 1 1f1b 0" "4 2 1 interleaved 2" "4 4 0 zb-h1 0" "2 2 0 zb-v 1" "3 3 0 auto 3"; do
    set -- $layout
    name="train, $1 ranks, pp $2, ZeRO $3, $4, recompute $5, fp32"
    check "$name" 90 mpirun -np "$1" build/cuda-fp32/train_gpt2 "${small[@]}" --pp "$2" --zero "$3" --schedule "$4" \
      --recompute "$5" --report-every 5 --comm mpi || continue
    many=$(final "$out/$(echo "$name" | tr ' /,' '___').log")
    if [ "$many" = "$one" ]; then row "  equal to 1 rank, all bits" "yes"; else row "  equal to 1 rank, all bits" "NO: $many"; fi
  done
else
  row "2 and 4 ranks on one GPU" "skipped: no mpirun"
fi

# 3. throughput; bench_step prints the matrix-product ceiling of the same run
for model in "124M 32 1024" "350M 16 1024" "1558M 4 1024" "124M 4 1024"; do
  set -- $model
  fits "step $1 B=$2 T=$3 bf16" 45 || continue
  if check "step $1 B=$2 T=$3 bf16" 60 build/cuda-bf16/bench_step "$1" "$2" "$3" 10; then
    sed -n '2,5p' "$out/$(echo "step $1 B=$2 T=$3 bf16" | tr ' /,' '___').log" >>"$table"
  fi
done
row "seconds" "$((SECONDS - start))"
cat "$table"
! grep -qE 'FAILED|NO:' "$table"
