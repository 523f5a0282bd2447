# test_lib.sh -- building, running and counting, for scripts/test.sh.
. scripts/mpi_env.sh
export GTEST_COLOR=no   # mpirun gives rank 0 a terminal; colours would hide the results from count

passed=0
failed=0
skipped=0
failures=()
jobs=$(nproc)
[ "$jobs" -gt 4 ] && jobs=4   # a program with all kernels takes about 1 GB to compile
logs=build/test_logs
mkdir -p "$logs"

host_tests() { basename -as .cpp test/test_*.cpp; }
mpi_tests() { basename -as .cu test/mpi_*.cu; }
# those of the named tests that are in test/
existing() { for name in "$@"; do [ -e "test/$name.cu" ] && echo "$name"; done; }

fail() {
  failed=$((failed + 1))
  failures+=("$1")
  echo "  FAILED $1"
}

# count LOG STATUS NAME: adds up what a GoogleTest program or a Python unittest printed. A program that died without
# saying what failed counts as one failure.
count() {
  local log="$1" status="$2" name="$3" ok bad skip total
  ok=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{n += $1} END {print n + 0}')
  bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{n += $1} END {print n + 0}')
  skip=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$log" | awk '{n += $1} END {print n + 0}')
  total=$(sed -n 's/^Ran \([0-9]*\) test.*/\1/p' "$log" | tail -1)
  if [ -n "$total" ]; then
    bad=$(grep -oE '(failures|errors)=[0-9]+' "$log" | tail -2 | awk -F= '{n += $2} END {print n + 0}')
    skip=$(grep -oE 'skipped=[0-9]+' "$log" | tail -1 | awk -F= '{n += $2} END {print n + 0}')
    ok=$((total - bad - skip))
  fi
  [ "$status" -ne 0 ] && [ "$bad" -eq 0 ] && bad=1
  [ "$status" -eq 0 ] && [ "$((ok + skip))" -eq 0 ] && bad=1
  passed=$((passed + ok))
  failed=$((failed + bad))
  skipped=$((skipped + skip))
  if [ "$bad" -ne 0 ]; then
    failures+=("$name (log: $log)")
    tail -n 40 "$log" | sed 's/^/    | /'
  fi
  printf '  %-58s %4d passed %3d failed %3d skipped\n' "$name" "$ok" "$bad" "$skip"
}

# run NAME SECONDS COMMAND...: runs, waits at most SECONDS, counts.
run() {
  local name="$1" seconds="$2" log status
  log="$logs/$(echo "$name" | tr ' /=' '___').log"
  shift 2
  timeout -k 10 "$seconds" "$@" >"$log" 2>&1 </dev/null
  status=$?
  [ "$status" -eq 124 ] && echo "timed out after $seconds s" >>"$log"
  count "$log" "$status" "$name"
}

# group NAME VARIABLE=VALUE... -- TEST...: builds the tests in that configuration and runs them.
group() {
  local name="$1" settings=() folder test log
  shift
  while [ "$1" != -- ]; do settings+=("$1"); shift; done
  shift
  case "$name" in *"$only"*) ;; *) return ;; esac
  [ $# -eq 0 ] && return
  folder=$(make -s DEVICE=cpu "${settings[@]}" print-config | sed 's/.*build \([^ ]*\) .*/\1/')
  log="$logs/build_$(basename "$folder")_$name.log"
  echo "== $name ${settings[*]}"
  if ! make -k -j"$jobs" DEVICE=cpu "${settings[@]}" "${@/#/$folder/}" >"$log" 2>&1; then
    grep -E 'error|Error' "$log" | head -20
    fail "build of $name ${settings[*]} (log: $log)"
  fi
  for test in "$@"; do
    [ -x "$folder/$test" ] || continue
    case "$test" in
      mpi_*)
        for ranks in 1 2 3 4 6; do
          [ "$ranks" -eq 6 ] && [ "$test" != mpi_exactness ] && continue
          # one thread a rank: the models are tiny, and threads that wait for each other cost more than they do
          run "$test, $ranks ranks" 300 env OMP_NUM_THREADS=1 scripts/mpirun.sh -q -np "$ranks" "$folder/$test"
        done ;;
      *) run "$test $(basename "$folder")" 600 "$folder/$test" ;;
    esac
  done
}

python_tests() {
  local file
  case "scripts" in *"$only"*) ;; *) return ;; esac
  echo "== scripts"
  make -j"$jobs" DEVICE=cpu train_gpt2 >"$logs/build_train_gpt2.log" 2>&1 || { tail -20 "$logs/build_train_gpt2.log"; fail "build of train_gpt2"; }
  for file in test/test_*.py; do
    run "$(basename "$file")" 1500 python3 "$file"
  done
}

# The CUDA build is compiled wherever there is an nvcc; nothing of it runs here.
nvcc_builds() {
  local nvcc precision
  case "nvcc" in *"$only"*) ;; *) return ;; esac
  nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
  if [ -z "$nvcc" ]; then
    echo "== nvcc: skipped, there is no nvcc here"
    skipped=$((skipped + 2))
    return
  fi
  echo "== nvcc, sm_80 and sm_90a"
  for precision in fp32 bf16; do
    if make DEVICE=cuda PRECISION=$precision "build/cuda-$precision/train_gpt2" >"$logs/nvcc_$precision.log" 2>&1; then
      passed=$((passed + 1))
      printf '  %-58s %4d passed\n' "train_gpt2 with nvcc, $precision" 1
    else
      tail -20 "$logs/nvcc_$precision.log"
      fail "train_gpt2 with nvcc, $precision"
    fi
  done
}

report() {
  local failure
  for failure in "${failures[@]}"; do echo "FAILED: $failure"; done
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ]
}
