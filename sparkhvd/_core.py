"""Reports that the compiled core is missing: Python imports this module only if it finds no compiled ``_core``.

In a folder, a compiled module takes precedence over a Python module of the same name. From a zip file, Python loads no
compiled modules.
"""

from __future__ import annotations

import socket
from pathlib import Path
from sysconfig import get_config_var

_GUIDE = "see docs/how-to/install.md"


def _remedy(folder: Path) -> str:
    if not folder.is_dir():
        return (
            "It is in an archive, from which Python cannot load compiled modules: --py-files, addPyFile and "
            "addArtifacts(pyfile=True) cannot send sparkhvd, not even as a wheel. Remove the archive there. Install "
            "the wheel in the Python of every executor, or send a packed environment with spark.archives or "
            f"addArtifacts(archive=True): {_GUIDE}."
        )
    if others := sorted(path.name for path in folder.glob("_core.*.so")):
        return f"It was built for another Python ({', '.join(others)}). Install the wheel of this Python: {_GUIDE}."
    return (
        "It is the source, which is not compiled. Install sparkhvd, and remove this folder from the import path: "
        f"{_GUIDE}."
    )


raise ImportError(
    f"The sparkhvd in {Path(__file__).parent} on host {socket.gethostname()} has no compiled core "
    f"(_core{get_config_var('EXT_SUFFIX')}). {_remedy(Path(__file__).parent)}"
)
