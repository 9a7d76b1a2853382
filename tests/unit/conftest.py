"""Fixtures of several folders of unit tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkhvd._util.frameworks import frameworks
from sparkhvd.comm import session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext


@pytest.fixture(scope="session", autouse=True)
def _folder_for_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Create the folder that torch uses from the first optimizer on, for the life of the process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torchinductor"))


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """Make this process a job of one rank, and provide its communicator."""
    session.set_launch_context(LaunchContext())
    session.init()
    yield session.current()
    session.shutdown()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Provide a function that installs ``added_package`` from its code and one entry point (group, name)."""

    def install_package(code: str, group: str, entry_point: str) -> None:
        site = tmp_path / "site-packages"
        metadata = site / "added_package-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / "added_package.py").write_text(code)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added-package\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "added_package", raising=False)
        frameworks.cache_clear()

    yield install_package
    frameworks.cache_clear()
