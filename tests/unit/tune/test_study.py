from __future__ import annotations

from pathlib import Path

import pytest

from sparkhvd.errors import ParamError
from sparkhvd.tune.study import StudySettings


def is_open(path: Path) -> bool:
    """Return whether this process has a file open."""
    return path in {file.resolve() for file in Path("/proc/self/fd").iterdir()}


def test_a_database_is_closed_when_its_study_is_refused(tmp_path):
    database = tmp_path.resolve() / "search.db"
    settings = StudySettings(f"sqlite:///{database}", "mine", None, None)
    with settings.opened(["minimize"]):
        assert is_open(database)
    message = r"has the directions \['minimize'\], but this search has \['maximize'\]"
    with pytest.raises(ParamError, match=message) as refusal, settings.opened(["maximize"]):
        pass
    assert not is_open(database), refusal
