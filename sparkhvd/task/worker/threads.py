"""How many threads the libraries of a rank use."""

from __future__ import annotations


def thread_defaults(cpus: int) -> dict[str, str]:
    """Environment variables that keep a rank's libraries to its own cores, where the user has set nothing else.

    PyTorch follows OMP and MKL. TensorFlow gets two threads at least for running operations beside each other: one that
    waits for other ranks must not keep the rest of the graph from running.
    """
    count = str(cpus)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TF_NUM_INTRAOP_THREADS": count,
        "TF_NUM_INTEROP_THREADS": str(max(2, cpus)),
    }
