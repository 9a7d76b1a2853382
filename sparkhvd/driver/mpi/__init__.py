"""The driver's part of the mpi launcher: service, ``mpirun``, and the remote shell that ``mpirun`` uses."""
