"""The error message for executors on which sparkhvd cannot be imported."""

from __future__ import annotations

import re

# sparkhvd itself, and the packages that it imports first, without those that Spark's own functions need, too.
_MISSING = re.compile(r"No module named '((?:sparkhvd|cloudpickle|fsspec)(?:\.[\w.]+)?)'")
# A line of the module that stands in for a missing ``sparkhvd._core``; the code of that line may precede it.
_NO_CORE = re.compile(r"(?<=ImportError: )The sparkhvd in .* has no compiled core .*")


def import_failure(text: str) -> str:
    """Return the message for a Spark error if a task could not import sparkhvd; empty for other errors.

    Args:
        text: Spark's error, with the traceback of the task.
    """
    if (no_core := _NO_CORE.search(text)) is not None:
        return no_core[0]
    if (missing := _MISSING.search(text)) is None:
        return ""
    return (
        f"The executors cannot import {missing[1]}: they lack sparkhvd or a package that it needs, or have a different "
        "version of it. Install this version on every node, in the Python that PYSPARK_PYTHON or spark.pyspark.python "
        "names, or send a packed environment with spark.archives. --py-files, addPyFile and addArtifacts(pyfile=True) "
        "cannot send sparkhvd, not even as a wheel: see docs/how-to/install.md."
    )
