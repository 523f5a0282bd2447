#!/usr/bin/env bash
# Installs what this machine lacks, on Debian or Ubuntu, and nothing that is there already.
#   scripts/install.sh build         g++, make, Open MPI, OpenBLAS
#   scripts/install.sh build test    and GoogleTest, Python
#   scripts/install.sh build plot    and Python with matplotlib
set -euo pipefail

packages=()
need() { packages+=("$@"); }

# compiles and links a one-line program: the only reliable sign that a library is usable
links() { echo "$1" | g++ -x c++ - -o /dev/null "${@:2}" 2>/dev/null; }
# some Python that has a module; scripts use the first of these that does
has_module() {
  local python
  for python in python3 /usr/bin/python3; do
    if command -v "$python" >/dev/null && "$python" -c "import $1" 2>/dev/null; then return 0; fi
  done
  return 1
}

for group in "$@"; do
  case "$group" in
    build)
      command -v g++ >/dev/null || need g++
      command -v make >/dev/null || need make
      { command -v mpicxx && command -v mpirun; } >/dev/null || need libopenmpi-dev openmpi-bin
      { command -v g++ >/dev/null && links '#include <cblas.h>
int main() { return (int)cblas_sdot(0, nullptr, 1, nullptr, 1); }' -lopenblas; } || need libopenblas-dev
      ;;
    test)
      command -v python3 >/dev/null || need python3
      { command -v g++ >/dev/null && links '#include <gtest/gtest.h>
int main() { testing::InitGoogleTest(); }' -lgtest -lpthread; } || need libgtest-dev
      ;;
    plot)
      command -v python3 >/dev/null || need python3
      has_module matplotlib || need python3-matplotlib
      ;;
    *)
      echo "error: scripts/install.sh: unknown group $group; use build, test or plot" >&2
      exit 2
      ;;
  esac
done

[ ${#packages[@]} -eq 0 ] && exit 0
echo "installing: ${packages[*]}"
if ! command -v apt-get >/dev/null; then
  echo "error: apt-get is not here; install by hand what these Debian packages hold: ${packages[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "error: not root and no sudo; as root: apt-get install ${packages[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update && "${as_root[@]}" apt-get install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 15 "$log" >&2
  echo "error: could not install ${packages[*]} (log: $log); check the network and try again" >&2
  exit 1
fi
rm -f "$log"
