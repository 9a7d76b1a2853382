"""The number of threads for the libraries of a rank."""

from __future__ import annotations


def thread_defaults(cpus: int) -> dict[str, str]:
    """Return environment variables that limit a rank's libraries to its cores, unless the user sets others.

    PyTorch follows OMP and MKL. TensorFlow gets at least two threads for running operations in parallel: an operation
    that waits for other ranks must not keep the rest of the graph from running.
    """
    count = str(cpus)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TF_NUM_INTRAOP_THREADS": count,
        "TF_NUM_INTEROP_THREADS": str(max(2, cpus)),
    }
