"""The backend `mpi4py` of `ddp.init`."""
