from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from sparkhvd.errors import ParamError, SearchError
from sparkhvd.estimators.runs import run_lease
from sparkhvd.store import Store
from sparkhvd.tune.study import (
    StudySettings,
    held,
    naming_storage,
    refuse_running_elsewhere,
    refuse_taken_over,
)


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


def test_a_study_leaves_no_lease_even_after_a_killed_search(tmp_path):
    store = Store.create(str(tmp_path / "store"))
    killed = run_lease.acquire_lease(store, "mine-search")
    run_lease._active_fits.discard(killed.holder.name)
    with held(store, "mine"):
        assert store.list("runs/mine-search")
    assert store.list("") == []
    assert not Path(store.root, "runs").exists(), "no folder is left either"


def test_a_study_whose_trials_run_in_another_store_is_refused(tmp_path):
    first, second = (Store.create(str(tmp_path / name)) for name in ("first", "second"))
    study = optuna.create_study(study_name="mine")
    refuse_running_elsewhere(study, first)
    trial = study.ask()
    refuse_running_elsewhere(study, first)
    with pytest.raises(ParamError, match=r"Study 'mine' has trials that run in the Store \S+/first, but .*/second"):
        refuse_running_elsewhere(study, second)
    study.tell(trial, 1.0)
    refuse_taken_over(study, first)
    refuse_running_elsewhere(study, second)
    refuse_taken_over(study, second)
    with pytest.raises(ParamError, match=r"Another search has continued study 'mine' with the Store \S+/second,"):
        refuse_taken_over(study, first)


def test_a_search_waits_a_minute_for_other_writers_of_a_sqlite_file(tmp_path):
    settings = StudySettings(f"sqlite:///{tmp_path}/search.db", "search", None, None)
    with settings.opened(["minimize"]) as study:
        engine = study._storage._backend.engine
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000


def test_the_error_of_a_storage_that_is_gone_names_the_study_and_says_how_to_continue(tmp_path):
    settings = StudySettings(f"sqlite:///{tmp_path}/search.db", "search", None, None)
    with settings.opened(["minimize"]) as study:
        (tmp_path / "search.db").unlink()
        message = r"ended the search of study 'search': .*readonly database\. Repair .* then continues the search\."
        with pytest.raises(SearchError, match=message), naming_storage(study):
            study.ask()
