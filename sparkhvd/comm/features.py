"""Horovod's queries about the build, and the switches of the timeline."""

from __future__ import annotations

from sparkhvd.comm import nccl, session
from sparkhvd.comm.connect import mpi


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what happens to every tensor from now on, as a Chrome trace; see ``Communicator.start_timeline``.

    Args:
        file_path: the file; existing content is replaced.
        mark_cycles: whether to show every cycle of the negotiation.

    Raises:
        ConfigError: a recording is already running.
    """
    session.current().start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the recording and complete its file; does nothing when none is running."""
    session.current().stop_timeline()


def mpi_built() -> bool:
    """Return whether ``init()`` can take ranks from MPI: mpi4py is installed."""
    return mpi.available()


def mpi_enabled() -> bool:
    """Return whether this job took its ranks from MPI."""
    return session.uses_mpi()


def mpi_threads_supported() -> bool:
    """Return whether any thread may use mpi4py while collectives run; the core itself makes no MPI calls."""
    if not mpi.available():
        return False
    return mpi.has_threads() if session.uses_mpi() else True


def gloo_built() -> bool:
    """Always False: links over TCP and shared memory are the core's own."""
    return False


def gloo_enabled() -> bool:
    """Always False, see ``gloo_built``."""
    return False


def nccl_built() -> int:
    """Return the version of the installed NCCL, such as 22907 for 2.29.7; 0 if there is none.

    It is used with ``SPARKHVD_GPU_OPERATIONS=nccl``.
    """
    return nccl.version()


def ddl_built() -> bool:
    """Always False."""
    return False


def ccl_built() -> bool:
    """Always False."""
    return False


def cuda_built() -> bool:
    """Return whether this host has a CUDA device; the build needs no CUDA."""
    return nccl.has_cuda()


def rocm_built() -> bool:
    """Always False: the core has no support for AMD's devices; torch copies their tensors through the CPU."""
    return False
