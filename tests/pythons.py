"""Virtual environments with some of the packages of this environment, whose files they share."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

# pyspark, and its requirements for functions on Arrow batches.
SPARK_DISTRIBUTIONS = ("pyspark", "py4j", "numpy", "pandas", "pyarrow", "python-dateutil", "pytz", "six", "tzdata")


def python_with(folder: Path, distributions: Iterable[str]) -> Path:
    """Create an environment in ``folder`` with only these distributions, and return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    here = Path(sysconfig.get_path("purelib"))
    for name in distributions:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}:
            (packages / top).symlink_to(here / top)
    return python
