"""Build the compiled core with CMake. CMakeLists.txt has the compile flags, pyproject.toml everything else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):
    """Build the extension in a separate folder and copy it to the path that setuptools expects."""

    def build_extension(self, ext: Extension) -> None:
        source = Path(__file__).resolve().parent
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        # All kinds of builds use the same folder, so that a build reuses the compiled files of earlier ones.
        staging = source / "build" / "core" / f"{sys.implementation.cache_tag}-{'ninja' if ninja else 'make'}"
        self.spawn(
            [
                "cmake",
                "-S",
                str(source),
                "-B",
                str(staging),
                *ninja,
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={_pybind11_folder()}",
                "-DCMAKE_BUILD_TYPE=Release",
            ]
        )
        # Without a number, make starts all compilers at once, which can exhaust the memory of the machine.
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))  # noqa: TID251
        self.spawn(["cmake", "--build", str(staging), "--target", "_core", "--parallel", jobs])
        output.parent.mkdir(parents=True, exist_ok=True)
        # A running process may have the old file mapped, so replace the file and never write into it.
        partial = output.with_name(output.name + ".partial")
        shutil.copyfile(staging / output.name, partial)
        partial.replace(output)


def _pybind11_folder() -> str:
    command = [sys.executable, "-m", "pybind11", "--cmakedir"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


setup(
    ext_modules=[Extension("sparkhvd._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # If the machine has no CMake, pip fetches it for this build only.
    setup_requires=[] if shutil.which("cmake") else ["cmake>=3.21"],
)
