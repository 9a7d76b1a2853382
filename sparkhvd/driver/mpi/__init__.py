"""The driver's side of the mpi launcher: the service, ``mpirun``, and the remote shell that ``mpirun`` uses."""
