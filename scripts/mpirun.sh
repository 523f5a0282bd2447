#!/usr/bin/env bash
# mpirun for laptops and containers: works as root, with more ranks than cores, without binding ranks to cores.
#   scripts/mpirun.sh -np 4 ./train_gpt2 --pp 2 ...
. "$(dirname "$0")/mpi_env.sh"
exec mpirun "$@"
