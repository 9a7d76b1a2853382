"""The import path of a rank, which equals the import path of its task.

Spark adds the files of ``addPyFile`` only to ``sys.path``, which the worker does not inherit. So the worker receives
the path in ``PYTHONPATH``. Before ``fn`` runs, the worker restores the variable's original value, because ``fn`` may
start another Python.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

IMPORT_PATH = "PYTHONPATH"


def python_module(executable: str, module: str) -> list[str]:
    """Return the command that runs a module in a Python; empty is the Python of this process.

    ``-P``: the module's import path does not begin with the current folder, which may have other modules with the names
    of those in this process.
    """
    return [executable or sys.executable, "-P", "-m", module]


def import_path(executable: str = "", first: str | None = None) -> str:
    """Return the ``PYTHONPATH`` that makes this process's modules importable in another Python.

    Args:
        executable: that Python; empty is the Python of this process. Another Python has its own standard library and
            packages, so those of this process are left out.
        first: a ``PYTHONPATH`` of the user, whose folders come first.
    """
    entries = [entry or str(Path.cwd()) for entry in sys.path]
    if executable and executable != sys.executable:
        entries = [entry for entry in entries if not _belongs_to_this_python(Path(entry))]
    return os.pathsep.join([first, *entries] if first else entries)


def _belongs_to_this_python(entry: Path) -> bool:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return entry.name == zipped or any(entry.is_relative_to(folder) for folder in folders)
