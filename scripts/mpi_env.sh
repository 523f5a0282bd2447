# mpi_env.sh -- what Open MPI needs on laptops and in containers; sourced by scripts, or by you before calling mpirun.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1   # containers run as root
export OMPI_MCA_rmaps_base_oversubscribe=1                         # more ranks than cores
export OMPI_MCA_mpi_yield_when_idle=1                              # a waiting rank leaves the core to a computing one
export OMPI_MCA_btl_base_warn_component_unused=0
export OMPI_MCA_hwloc_base_binding_policy=none                     # no rank is tied to one core
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"               # the same for waiting threads
