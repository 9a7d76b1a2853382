"""The study of a search: Optuna's record of its trials, opened by one search at a time."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from sparkhvd.compat.horovod import not_installed
from sparkhvd.errors import ParamError, SearchError, StoreError
from sparkhvd.estimators.runs.run_lease import hold_run
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

Direction = Literal["minimize", "maximize"]

_MARK = "sparkhvd:"  # the prefix of this package's attributes in a study
_RUNS = f"{_MARK}runs"
_STORE = f"{_MARK}store"

# How long a write waits for other writers of a SQLite file, such as a copy of the file; its error would end the search.
_SQLITE_SECONDS = 60.0

_LONGEST_END = "-0123abcd-1234567"  # of a run's id, after the name of its study


@dataclass(frozen=True)
class StudySettings:
    """The arguments of a search that are passed to Optuna."""

    storage: str | optuna.storages.BaseStorage | None
    name: str | None
    sampler: optuna.samplers.BaseSampler | None
    pruner: optuna.pruners.BasePruner | None

    @contextmanager
    def opened(self, directions: Sequence[Direction]) -> Iterator[optuna.Study]:
        """Create the study, or load it if the storage contains it; close connections to a database at the end.

        Raises:
            ParamError: the storage needs a name, or its study has other directions.
        """
        try:
            import optuna  # noqa: PLC0415  (optional)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(not_installed("sparkhvd.tune", "optuna"), name="optuna") from error
        if self.name is not None:
            check_name(self.name)
        if isinstance(self.sampler, type) or isinstance(self.pruner, type):
            raise ParamError("sampler and pruner must be objects, not classes: call the class, as in MedianPruner().")
        if self.storage is not None and self.name is None:
            raise ParamError(
                "A search with a storage needs study_name: by this name, a later call finds the study and continues it."
            )
        storage = _opened_storage(self.storage) if isinstance(self.storage, str) else self.storage
        try:
            study = optuna.create_study(
                storage=storage,
                study_name=self.name or f"search-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
                sampler=self.sampler,
                pruner=self.pruner,
                directions=list(directions),
                load_if_exists=True,
            )
            if (stored := [direction.name.lower() for direction in study.directions]) != list(directions):
                raise ParamError(
                    f"Study {self.name!r} in this storage has the directions {stored}, but this search has "
                    f"{list(directions)}. Choose another study_name, or search by the same metrics."
                )
            yield study
        finally:
            if isinstance(storage, optuna.storages.RDBStorage) and storage is not self.storage:
                storage.remove_session()
                storage.engine.dispose()  # the study opens new ones when it is used again


def _opened_storage(url: str) -> optuna.storages.BaseStorage:
    import optuna  # noqa: PLC0415  (optional)

    try:
        if url.startswith("redis"):  # the only URLs that SQLAlchemy does not open
            return optuna.storages.get_storage(url)
        waits = url.startswith("sqlite") and "timeout=" not in url
        return optuna.storages.RDBStorage(
            url, engine_kwargs={"connect_args": {"timeout": _SQLITE_SECONDS}} if waits else None
        )
    except Exception as error:  # of SQLAlchemy or a driver of a database
        raise ParamError(
            f"Optuna cannot open storage={url!r}: {error}. Pass the URL of a database, such as 'sqlite:///search.db', "
            "or an object of optuna.storages."
        ) from error


@contextmanager
def naming_storage(study: optuna.Study) -> Iterator[None]:
    """Say in the errors of Optuna's storage which study they belong to, and how to continue.

    Raises:
        SearchError: the storage failed.
    """
    import sqlalchemy.exc  # noqa: PLC0415  (Optuna requires it)
    from optuna.exceptions import StorageInternalError  # noqa: PLC0415  (optional)

    name = study.study_name  # now, because it may come from the storage
    try:
        yield
    except (StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise SearchError(
            f"Optuna's storage failed, which ended the search of study {name!r}: {reason}. Repair the storage. The "
            "same call then continues the search."
        ) from error


def check_name(name: str) -> None:
    """Refuse the name of a study that cannot be part of a folder's name.

    Raises:
        ParamError: the name is not allowed; the message states the rule.
    """
    try:
        layout.run_folder(name and f"{name}{_LONGEST_END}")
    except StoreError as error:
        raise ParamError(
            f"study_name={name!r:.300} is part of the names of folders in the Store. Use 1 to 180 characters, none of "
            "which is '/', '\\' or a control character, and do not begin with a dot."
        ) from error


@contextmanager
def held(store: Store, study_name: str) -> Iterator[None]:
    """Hold a study inside ``with``, so that trials that still run in it must be those of a killed search.

    Raises:
        ParamError: another search holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_run(store, f"{study_name}-search", is_fenced=False))
        except ParamError as error:
            raise ParamError(f"Study {study_name!r} belongs to a search that is still running: {error}") from error
        yield


def refuse_running_elsewhere(study: optuna.Study, store: Store) -> None:
    """Refuse a study whose trials run in another Store, because ``held`` excludes searches with the same Store only.

    Raises:
        ParamError: a search with another Store runs trials, or was killed.
    """
    from optuna.trial import TrialState  # noqa: PLC0415  (optional)

    last: str = study.user_attrs.get(_STORE, store.url)
    if last != store.url and study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        raise ParamError(
            f"Study {study.study_name!r} has trials that run in the Store {last}, but this search has {store.url}. "
            "Continue with the first Store, or choose another study_name."
        )
    study.set_user_attr(_STORE, store.url)


def refuse_taken_over(study: optuna.Study, store: Store) -> None:
    """Refuse to continue a study of which a search with another Store has begun at the same time.

    Raises:
        ParamError: the other search has taken the study over.
    """
    last = study.user_attrs.get(_STORE)
    if last is not None and last != store.url:
        raise ParamError(
            f"Another search has continued study {study.study_name!r} with the Store {last}, so this search, with "
            f"{store.url}, has ended. Use the same Store for all searches of a study."
        )


def run_prefix(study: optuna.Study) -> str:
    """Return the prefix of the ids of a study's runs, which differs between studies of the same name."""
    prefix: str = study.user_attrs.get(_RUNS) or f"{study.study_name}-{uuid.uuid4().hex[:8]}"
    study.set_user_attr(_RUNS, prefix)
    return prefix


def seed_of(study: optuna.Study, own: int | None) -> int:
    """Return the seed of all trials, so that they differ only in their parameters, even after a restart."""
    if own is not None:
        return own
    stored: int | None = study.user_attrs.get(f"{_MARK}random_seed")  # kept by check_comparable
    return secrets.randbelow(2**31) if stored is None else stored


def check_comparable(study: optuna.Study, facts: Mapping[str, object]) -> None:
    """Refuse to continue a study whose trials could not be compared with the new ones.

    Args:
        study: the study, which keeps the facts of its first search.
        facts: what all trials must have in common, by name.

    Raises:
        ParamError: a fact differs.
    """
    for name, value in facts.items():
        key = f"{_MARK}{name}"
        stored = study.user_attrs.get(key, value)
        if stored != value:
            raise ParamError(
                f"The earlier trials of study {study.study_name!r} have {name} {stored}, but this search has {value}, "
                f"so they could not be compared. Continue with the same {name}, or choose another study_name."
            )
        study.set_user_attr(key, value)


def warn_of_other_rows(study: optuna.Study, fingerprint: str | None) -> None:
    """Warn if a continued study may train on other rows than before, though ``check_comparable`` found no difference.

    Args:
        study: the study, which keeps the fingerprint of the latest search.
        fingerprint: of the rows; None if they cannot be recognized. It also depends on the session's settings, so equal
            rows may have different fingerprints.
    """
    key = f"{_MARK}fingerprint"
    stored = study.user_attrs.get(key)
    if fingerprint is not None and stored not in {None, fingerprint}:
        logger.warning(
            "The rows of study %r, or settings of Spark on which they depend, have changed since its earlier trials. "
            "If the rows differ, the trials cannot be compared; choose another study_name then.",
            study.study_name,
        )
    study.set_user_attr(key, fingerprint)
