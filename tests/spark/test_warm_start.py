"""The warm process of an executor, which all its tasks share."""

from __future__ import annotations

import os

import pytest

import sparkhvd

pytestmark = pytest.mark.spark


def where_imported() -> tuple[int, int]:
    """Return the process of this rank and the one that imported the module."""
    import imported_once  # noqa: PLC0415

    return os.getpid(), imported_once.PROCESS


def test_the_tasks_of_an_executor_share_one_warm_process(spark, tmp_path):
    (tmp_path / "imported_once.py").write_text("import os\nPROCESS = os.getpid()\n")
    options = {"preload": ("imported_once",), "env": {"PYTHONPATH": str(tmp_path)}}
    first = sparkhvd.run(where_imported, num_proc=2, **options)
    later = sparkhvd.run(where_imported, num_proc=4, **options)  # with two more of Spark's Python workers
    assert len({own for own, _ in first + later}) == 6
    assert len({imported for _, imported in first + later}) == 1, "more than one rank imported the module"
