"""The CUDA driver and NCCL, with which collectives work on CUDA tensors without copies through the CPU."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sparkhvd import _core
from sparkhvd.config import Config, restrict_nccl_to, visible_devices
from sparkhvd.errors import ConfigError

# The name under which NVIDIA's driver is installed on the linker's path.
_CUDA = "libcuda.so.1"
_NCCL = "libnccl.so.2"
_MANAGEMENT = "libnvidia-ml.so.1"

_log = logging.getLogger(__name__)


def library() -> str:
    """Return the path of the NCCL that the torch wheel installs, or else the system's name for it."""
    namespace = find_spec("nvidia")
    folders = [] if namespace is None else namespace.submodule_search_locations or []
    paths = [str(path) for folder in folders if (path := Path(folder, "nccl", "lib", _NCCL)).is_file()]
    return paths[0] if paths else _NCCL


def libraries(config: Config) -> _core.DeviceLibraries | None:
    """Load both libraries if the settings ask for NCCL; otherwise return None.

    Raises:
        ConfigError: a library cannot be used here, or the settings also ask for encryption.
    """
    if config.gpu_operations != "nccl":
        return None
    if config.encrypt:
        raise ConfigError(
            "SPARKHVD_ENCRYPT and SPARKHVD_GPU_OPERATIONS=nccl cannot be combined: NCCL does not encrypt its own "
            "connections. Unset one of them; without NCCL, CUDA tensors go through the CPU and the links of the ranks."
        )
    restrict_nccl_to(config.network_interfaces)
    try:
        return _core.DeviceLibraries(_CUDA, library())
    except _core.CoreError as error:
        raise ConfigError(
            f"SPARKHVD_GPU_OPERATIONS=nccl does not work on this host: {error.args[1]}. Install NVIDIA's driver and "
            "the nvidia-nccl package of its CUDA version, or unset the variable (HOROVOD_GPU_OPERATIONS counts, too): "
            "CUDA tensors then go through the CPU."
        ) from error


def version() -> int:
    """Return the version of NCCL, such as 22907 for 2.29.7; 0 if no usable NCCL is installed."""
    try:
        return _core.nccl_version(library())
    except _core.CoreError:
        return 0


def has_cuda() -> bool:
    """Return whether NVIDIA's driver is installed and this process may see a device.

    This does not call CUDA, because a process that has initialized CUDA cannot use it in forked children.
    """
    visible = visible_devices()
    if visible is not None and visible.strip() in {"", "-1"}:
        return False
    try:
        return count_devices(ctypes.CDLL(_MANAGEMENT)) > 0
    except (OSError, AttributeError):  # no driver, or a library of this name without the functions
        return False


def count_devices(management: ctypes.CDLL) -> int:
    """Return the number of devices that NVIDIA's management library (NVML) reports; 0 if it fails."""
    if management.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if management.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        management.nvmlShutdown()


@dataclass(slots=True)
class Suggestion:
    """The suggestion to let NCCL move CUDA tensors, logged once, at the first CUDA tensor.

    Attributes:
        is_due: whether the suggestion is still to be logged here.
    """

    is_due: bool = False

    def make(self) -> None:
        """Log the suggestion, once."""
        if self.is_due:
            self.is_due = False
            _log.warning(
                "CUDA tensors are copied through the CPU. Set SPARKHVD_GPU_OPERATIONS=nccl on all ranks to let NCCL "
                "move them from GPU to GPU, or SPARKHVD_GPU_OPERATIONS=staged to keep copying through the CPU without "
                "this warning."
            )
