from __future__ import annotations

import os
import re
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkhvd.cli.check_build import check_build
from sparkhvd.comm import features, nccl, session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.config import NCCL_INTERFACES, Config
from sparkhvd.errors import ConfigError

_ASKED = Config(gpu_operations="nccl")


def version_of_the_wheel() -> int:
    """Return the version in the metadata of the installed package; 0 without one."""
    versions = [each.version for each in distributions() if each.name.startswith("nvidia-nccl")]
    major, minor, patch = map(int, re.findall(r"\d+", versions[0])[:3]) if versions else (0, 0, 0)
    return major * 10000 + minor * 100 + patch


@pytest.mark.skipif(not version_of_the_wheel(), reason="no package nvidia-nccl is installed")
def test_the_nccl_of_the_wheel_is_found_and_loaded():
    assert Path(nccl.library()).is_file()
    assert nccl.version() == features.nccl_built() == version_of_the_wheel()
    assert "[X] NCCL" in check_build()


def test_without_a_wheel_nccl_is_searched_by_name(monkeypatch):
    monkeypatch.setattr(nccl, "find_spec", lambda name: None)
    assert nccl.library() == "libnccl.so.2"


def test_an_nccl_that_cannot_be_loaded_counts_as_none(monkeypatch):
    monkeypatch.setattr(nccl, "library", lambda: "/nowhere/libnccl.so.2")
    assert features.nccl_built() == 0
    assert "[ ] NCCL" in check_build()


def test_nccl_is_loaded_only_on_request(monkeypatch):
    monkeypatch.setattr(nccl, "library", lambda: pytest.fail("NCCL has not been requested"))
    assert nccl.libraries(Config()) is None


@pytest.mark.parametrize(
    ("interfaces", "own", "found"),
    [("eth1, ib0", "", "=eth1,ib0"), ("", "", ""), ("eth1", "^docker0", "^docker0")],
)
def test_nccl_uses_the_named_interfaces_unless_the_environment_sets_its_own(interfaces, own, found, monkeypatch):
    monkeypatch.setenv(NCCL_INTERFACES, own)
    monkeypatch.setattr(nccl, "library", lambda: "/nowhere/libnccl.so.2")
    with pytest.raises(ConfigError, match="does not work on this host"):
        nccl.libraries(Config(gpu_operations="nccl", network_interfaces=interfaces))
    assert os.environ[NCCL_INTERFACES] == found


def fake_nvml(initialized: int, devices: int, ended: list[str]) -> SimpleNamespace:
    """Return a fake NVML with this result of its initialization and this number of devices."""

    def count(pointer) -> int:
        pointer._obj.value = devices
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: initialized, nvmlDeviceGetCount_v2=count, nvmlShutdown=lambda: ended.append("NVML")
    )


def test_devices_are_counted_without_initializing_cuda_so_that_children_may_use_it():
    ended: list[str] = []
    assert nccl.count_devices(fake_nvml(0, 2, ended)) == 2
    assert nccl.count_devices(fake_nvml(9, 2, ended)) == 0
    assert ended == ["NVML"]


def test_a_process_that_may_see_no_device_has_none(monkeypatch):
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda _: fake_nvml(0, 1, []))
    for visible, found in (("", False), ("-1", False), ("0", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert features.cuda_built() is found


def test_the_advice_about_cuda_tensors_is_logged_once(caplog):
    due, not_due = nccl.Suggestion(True), nccl.Suggestion()
    for suggestion in (due, due, not_due):
        suggestion.make()
    (line,) = caplog.messages
    assert line.startswith("CUDA tensors are copied through the CPU. Set SPARKHVD_GPU_OPERATIONS=nccl on all ranks")


def test_nccl_and_encryption_exclude_each_other():
    with pytest.raises(ConfigError, match="SPARKHVD_ENCRYPT and SPARKHVD_GPU_OPERATIONS=nccl cannot be combined"):
        nccl.libraries(Config(gpu_operations="nccl", encrypt=True))


@pytest.mark.skipif(features.cuda_built(), reason="there is a CUDA device here")
def test_requesting_nccl_without_a_device_fails_at_start_with_a_remedy():
    session.set_launch_context(LaunchContext(config=_ASKED))
    message = r"SPARKHVD_GPU_OPERATIONS=nccl does not work on this host: .*libcuda.* or unset the variable"
    with pytest.raises(ConfigError, match=message):
        session.init()
    assert not session.is_initialized()
    session.set_launch_context(LaunchContext())


def test_handles_of_device_operations_create_their_result_once():
    session.set_launch_context(LaunchContext())
    session.init()
    try:
        calls: list[str] = []
        barrier = session.current().barrier_async(name="first")

        def stream() -> int:
            calls.append("stream")
            return 0

        handle = barrier.then(lambda _: object()).behind(stream)
        assert handle.wait() is handle.wait()
        assert calls == ["stream"]
        assert session.current().barrier_async(name="second").with_device_wait().wait() is None  # no device is involved
    finally:
        session.shutdown()
