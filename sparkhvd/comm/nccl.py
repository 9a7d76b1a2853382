"""Where CUDA's driver and NCCL are, with which collectives work on CUDA tensors without copies through the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sparkhvd import _core
from sparkhvd.config import Config
from sparkhvd.errors import ConfigError

# The name under which NVIDIA's driver installs it, wherever the linker looks.
_CUDA = "libcuda.so.1"
_NCCL = "libnccl.so.2"


def library() -> str:
    """The NCCL of the wheel that torch brings along, else the name under which the system may have one."""
    namespace = find_spec("nvidia")
    folders = [] if namespace is None else namespace.submodule_search_locations or []
    found = [str(path) for folder in folders if (path := Path(folder, "nccl", "lib", _NCCL)).is_file()]
    return found[0] if found else _NCCL


def libraries(config: Config) -> _core.DeviceLibraries | None:
    """Both, loaded, where the settings ask for NCCL.

    Raises:
        ConfigError: they ask for it, and one of the two cannot be used here, or for encryption as well.
    """
    if config.gpu_operations != "nccl":
        return None
    if config.encrypt:
        raise ConfigError(
            "SPARKHVD_ENCRYPT and SPARKHVD_GPU_OPERATIONS=nccl exclude each other: NCCL's own connections are not "
            "encrypted. Unset one of them; without NCCL, CUDA tensors go through the CPU and the links of the ranks."
        )
    try:
        return _core.DeviceLibraries(_CUDA, library())
    except _core.CoreError as error:
        raise ConfigError(
            f"SPARKHVD_GPU_OPERATIONS=nccl does not work on this host: {error.args[1]}. Install NVIDIA's driver and "
            "the nvidia-nccl package of its CUDA version, or unset the variable: CUDA tensors then go through the CPU."
        ) from error


def version() -> int:
    """The version of NCCL, such as 22907 for 2.29.7; 0 where there is none that can be used."""
    try:
        return _core.nccl_version(library())
    except _core.CoreError:
        return 0


def has_cuda() -> bool:
    """Whether there are CUDA's driver and a device."""
    try:
        _core.check_cuda(_CUDA)
    except _core.CoreError:
        return False
    return True
