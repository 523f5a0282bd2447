# make train_gpt2            the program, for CUDA if nvcc and a GPU are here, else for the CPU
# make DEVICE=cpu|cuda       force the device          PRECISION=fp32|bf16   type of weights and activations
# make WARP=1|32             CPU device: threads of a warp (1 = fast, 32 = as on a GPU, for tests)
# make SANITIZE=address|thread DEBUG=1                 CPU device: instrumented builds
# make bench                 time of kernels and steps beside ceilings         make ladders   kernels from naive to fast
# make bench-pipeline        two ranks against one: efficiency and bubble, measured beside simulated
# make tests                 every test program        make test      builds and runs the test suite
# make format                clang-format              make info      what was found and chosen
MAKEFLAGS += -r
.DELETE_ON_ERROR:

NVCC      ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
HAS_GPU   := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEVICE    ?= $(if $(and $(NVCC),$(filter-out 0,$(HAS_GPU))),cuda,cpu)
PRECISION ?= fp32
WARP      ?= 1
SANITIZE  ?=
DEBUG     ?= 0

CONFIG := $(DEVICE)-$(PRECISION)$(if $(filter cpu,$(DEVICE)),-w$(WARP))$(if $(SANITIZE),-$(SANITIZE))$(if $(filter 1,$(DEBUG)),-debug)
BUILD  := build/$(CONFIG)

# Open MPI: asked from its own compiler wrapper; MPI=0 builds for one process only.
MPICXX ?= $(shell command -v mpicxx 2>/dev/null)
MPI    ?= $(if $(MPICXX),1,0)
ifeq ($(MPI),1)
MPI_COMPILE := $(shell $(MPICXX) --showme:compile) -DLLMC_MPI
MPI_LINK    := $(shell $(MPICXX) --showme:link)
endif

DEFINES  := -DPRECISION_$(if $(filter bf16,$(PRECISION)),BF16,FP32)
WARNINGS := -Wall -Wextra -Werror -Wno-unknown-pragmas
GTEST    := -lgtest_main -lgtest -lpthread

ifeq ($(DEVICE),cuda)
# 80 and 90a unless the GPU of this machine says otherwise
GPU_ARCH ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | grep -E '^[0-9]+$$' | sort -n | head -1)
# NCCL: used where the compiler finds its header; without it several GPUs talk through host memory
NCCL     := $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 && echo 1 || echo 0)
ARCHS    := $(if $(GPU_ARCH),$(if $(filter 90,$(GPU_ARCH)),90a,$(GPU_ARCH)),80 90a)
CXXCMD   := $(NVCC)
FLAGS    := -std=c++17 -O3 -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas,-fopenmp \
            $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) $(DEFINES) \
            $(filter-out -pthread,$(MPI_COMPILE)) -I. -x cu
LINK     := $(filter-out -pthread -Wl%,$(MPI_LINK)) -lcublasLt $(if $(filter 1,$(NCCL)),-lnccl) -lpthread
DEPFLAGS  = -MMD -MP -MF $(BUILD)/$(@F).d
else
CXXCMD   := $(CXX)
# -O3 is what users run; warps of 32 exist for tests, where compile time counts for more
OPTIMISE := $(if $(filter 1,$(DEBUG)),-O1 -g,$(if $(SANITIZE),-O1 -g1,$(if $(filter 1,$(WARP)),-O3,-O1)))
FLAGS    := -std=c++17 $(OPTIMISE) -march=native -fno-math-errno -fno-trapping-math -fopenmp $(WARNINGS) $(DEFINES) \
            -DLLMC_WARP=$(WARP) $(if $(filter 1,$(DEBUG)),-DLLMC_DEBUG) $(MPI_COMPILE) -I.
ifeq ($(SANITIZE),address)
FLAGS    += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
else ifeq ($(SANITIZE),thread)
FLAGS    += -fsanitize=thread -fno-omit-frame-pointer
endif
LINK     := $(MPI_LINK) -lopenblas -lpthread
DEPFLAGS  = -MMD -MP -MF $(BUILD)/$(@F).d
endif
COMPILE = @mkdir -p $(@D); echo "  $(CONFIG)  $(<F)"; $(CXXCMD) $(FLAGS) $(DEPFLAGS)
CPP_AS  = $(if $(filter cpu,$(DEVICE)),-x c++)

PROGRAMS := train_gpt2
TESTS    := $(sort $(basename $(notdir $(wildcard test/test_*.cu test/test_*.cpp test/mpi_*.cu))))

LADDERS  := $(patsubst dev/cuda/%/bench.cu,ladder_%,$(wildcard dev/cuda/*/bench.cu))

.PHONY: all tests test bench bench-pipeline ladders format info print-config clean
all: train_gpt2
train_gpt2: $(BUILD)/train_gpt2
	@cp -f $< $@
tests: $(addprefix $(BUILD)/,$(TESTS))
test:
	@scripts/test.sh
# the teaching ladders of dev/cuda, naive to fast, each rung verified before it is timed
ladders: $(addprefix $(BUILD)/,$(LADDERS))
	@for ladder in $^; do $$ladder || exit 1; done
# one step of GPT-2 124M at the two sizes of the README, then every kernel; each beside a ceiling measured in the same run
bench: $(BUILD)/bench_step $(BUILD)/bench_kernels $(BUILD)/bench_elementwise
	$(BUILD)/bench_step 124M 4 64 7
	$(BUILD)/bench_step 124M 4 256 3
	$(BUILD)/bench_kernels
	$(BUILD)/bench_elementwise
bench-pipeline:
	dev/bench/bench_pipeline.py

$(BUILD)/train_gpt2: train_gpt2.cu
	$(COMPILE) $(CPP_AS) $< -o $@ $(LINK)
$(BUILD)/test_%: test/test_%.cu
	$(COMPILE) $(CPP_AS) $< -o $@ $(LINK) $(GTEST)
$(BUILD)/test_%: test/test_%.cpp
	$(COMPILE) $< -o $@ $(LINK) $(GTEST)
$(BUILD)/mpi_%: test/mpi_%.cu
	$(COMPILE) $(CPP_AS) $< -o $@ $(LINK) $(GTEST)
$(BUILD)/bench_%: dev/bench/bench_%.cu
	$(COMPILE) $(CPP_AS) $< -o $@ $(LINK)

$(BUILD)/ladder_%: dev/cuda/%/bench.cu
	$(COMPILE) $(CPP_AS) $< -o $@ $(LINK)

format:
	clang-format -i $$(git ls-files '*.h' '*.cuh' '*.cu' '*.cpp')
info print-config:
	@echo "device $(DEVICE)  precision $(PRECISION)  build $(BUILD)  MPI $(MPI)  nvcc $(or $(NVCC),none)  archs $(or $(ARCHS),-)"
clean:
	rm -rf build train_gpt2

-include $(wildcard $(BUILD)/*.d)
