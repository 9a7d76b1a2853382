"""The content of the wheel and of the sdist."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import sparkhvd

_ROOT = Path(__file__).parents[2]
_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def _files(folder: str, *patterns: str) -> set[str]:
    return {str(path.relative_to(_ROOT)) for pattern in patterns for path in (_ROOT / folder).rglob(pattern)}


def _built(command: list[str], folder: Path, **environment: str) -> None:
    """Run a build with the tools of this environment that leaves nothing in the source."""
    settings = folder / "settings.cfg"
    settings.write_text(f"[build]\nbuild_base={folder / 'build'}\n[egg_info]\negg_base={folder}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = os.environ | {"DIST_EXTRA_CONFIG": str(settings), "PATH": path} | environment
    result = subprocess.run(
        [sys.executable, *command], cwd=_ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _runs_with_gcc_11s_library(module: bytes) -> bool:
    """Return whether a module compiled by GCC 12 or older needs no newer libstdc++ than GCC 11's."""
    compilers = [int(version) for version in re.findall(rb"GCC: \([^)]*\) (\d+)", module)]
    needed = [int(version) for version in re.findall(rb"GLIBCXX_3\.4\.(\d+)", module)]
    return max(compilers, default=99) > 12 or max(needed) <= 29


def test_the_wheel_contains_the_compiled_core_and_every_module_and_its_build_needs_no_framework(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    for name in ("torch", "tensorflow", "pyspark"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('the build imported {name}')\n")
    # Use the existing build folder of the core.
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(_ROOT)]
    _built(build, tmp_path, PYTHONPATH=str(blocked))

    (built,) = tmp_path.glob("sparkhvd-*.whl")
    wheel = zipfile.ZipFile(built)
    content = wheel.namelist()
    (module,) = (name for name in content if name.startswith("sparkhvd/_core.") and name.endswith(".so"))
    assert _runs_with_gcc_11s_library(wheel.read(module)), "RHEL 9 and Amazon Linux 2023 have no newer libstdc++"
    assert "sparkhvd/py.typed" in content
    assert _files("sparkhvd", "*.py") <= set(content)
    assert not [name for name in content if name.startswith(("tests/", "core/"))]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Message]:
    """Return the files of the sdist, without their top folder, and its metadata."""
    folder = tmp_path_factory.mktemp("sdist")
    _built(["-c", _BUILD_SDIST, str(folder)], folder)
    name = f"sparkhvd-{sparkhvd.__version__}"
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        files = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
        metadata = archive.extractfile(f"{name}/PKG-INFO")
        assert metadata is not None
        return files, email.message_from_binary_file(metadata)


def test_the_sdist_contains_all_files_of_a_build_and_no_compiled_files(sdist: tuple[set[str], Message]) -> None:
    files, _ = sdist
    assert _files("sparkhvd", "*.py", "*.pyi", "py.typed") <= files
    assert _files("core", "*.cc", "*.h") | _files("cmake", "*") <= files
    assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py"} <= files
    assert not [name for name in files if name.startswith(("tests/", "build/")) or name.endswith((".so", ".pyc", ".o"))]


def test_the_metadata_matches_the_project(sdist: tuple[set[str], Message]) -> None:
    _, metadata = sdist
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert (metadata["Name"], metadata["Version"]) == ("sparkhvd", sparkhvd.__version__)
    assert metadata["License-Expression"] == project["license"]
    assert set(metadata["Requires-Python"].split(",")) == set(project["requires-python"].split(","))
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    always = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert len(always) == len(project["dependencies"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (_ROOT / "README.md").read_text().strip()


def test_a_build_starts_one_compiler_per_processor_unless_cmakes_variable_sets_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(_ROOT / "setup.py", tmp_path)
    (tmp_path / "sparkhvd").mkdir()
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    cmake.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\ntest "$1" = -S || touch "$2/_core{suffix}"\nmkdir -p "$4"'
    )
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cmake.parent}:/usr/bin:/bin")
    for number in ("", "1"):
        if number:
            monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", number)
        else:
            monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL", raising=False)
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path, check=True, timeout=240
        )
        last_call = (tmp_path / "calls").read_text().splitlines()[-1]
        assert last_call.endswith(f"--target _core --parallel {number or len(os.sched_getaffinity(0))}")
