"""The part of the mpi launcher that runs inside the Spark tasks and the ranks."""
