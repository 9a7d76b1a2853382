"""The trials of a search: fits in threads, each with a run of its own."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from sparkhvd._util.background import in_background, raise_in_thread
from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import inheriting, is_stopped
from sparkhvd.data.prepare.prepared_data import PreparedData
from sparkhvd.data.spark.job import add_tag, cancel, new_tag
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ParamError, SearchError, StoreError
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.params.policies import metric_values
from sparkhvd.estimators.training import checkpoint
from sparkhvd.estimators.training.epoch_callback import requests_end
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store
from sparkhvd.tune.halving import Ladder, SuccessiveHalving
from sparkhvd.tune.ranking import CONSTRAINTS, RUN_ID, best_trials
from sparkhvd.tune.reports import SearchArgumentError, TrialReports, metrics_of
from sparkhvd.tune.study import refuse_taken_over

if TYPE_CHECKING:
    import optuna
    from pyspark.sql import SparkSession

    from sparkhvd.estimators.models.model import TrainedModel
    from sparkhvd.estimators.reports import EpochRecord

logger = logging.getLogger(__name__)

Space = Callable[["optuna.Trial"], Mapping[str, object]]

_ERROR = "sparkhvd:error"  # the attribute with the reason of a failure; an interrupted trial has none
_ERROR_LIMIT = 2000
_KEEPS_RUN = "sparkhvd:keeps_run"  # the attribute of trials whose runs are never removed
_REMOVABLE = "sparkhvd:removable"  # the study's attribute with the runs that may be removed when a trial ends
_ASKING = "sparkhvd:asking"  # the study's attribute with the time at which a search last asked for a trial
_POLL_SECONDS = 0.5
_OUTCOMES = {"COMPLETE": "completed", "PRUNED": "was pruned", "FAIL": "failed"}
# The trials share the rows, so these parameters are set on the estimator only.
_ROW_PARAMETERS = ("data", "validation", "compress_sparse_cols", "partitions_per_process", "keep_data")
_SHARED_PARAMETERS = ("store", "run_id", "resume", "epoch_callback", *_ROW_PARAMETERS)


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search: the number of trials, how many run at once, and the seconds within which trials start."""

    trials: int
    parallelism: int
    seconds: float | None

    def __post_init__(self) -> None:
        for name, value in (("n_trials", self.trials), ("parallelism", self.parallelism)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParamError(f"{name}={value!r} must be a whole number of at least 1.")
        if self.seconds is not None and not self.seconds > 0:
            raise ParamError(f"timeout={self.seconds!r} must be positive, or None.")


class _InterruptedError(BaseException):
    """Raised in the fits of an interrupted search. Like Ctrl-C in a fit, it passes by handlers of ``Exception``."""


@dataclass(frozen=True)
class Attempt:
    """A fit of a trial up to a rung.

    Attributes:
        trial: the trial.
        run_id: its run, which all of its attempts train.
        reports: its reports to Optuna.
        rung: the number of the rung.
        parameters: the parameters that the space returned; None before the call.
    """

    trial: optuna.Trial
    run_id: str
    reports: TrialReports
    rung: int = 0
    parameters: Mapping[str, object] | None = None


class Trials:
    """The trials of a search, in threads.

    Args:
        template: the estimator that the trials copy.
        data: the rows of all trials.
        store: the Store of the runs.
        space: returns the parameters of a trial.
        study: Optuna's study.
        metrics: the metrics that the study optimizes.
        spark: the session.
        prefix: the beginning of the ids of the runs.
        halving: determines how long each trial is trained; None trains all of them to the end.
        keep_runs: whether the runs of all trials are kept.
    """

    def __init__(  # noqa: PLR0917
        self,
        template: DistributedEstimator,
        data: PreparedData,
        store: Store,
        space: Space,
        study: optuna.Study,
        metrics: Sequence[str],
        spark: SparkSession,
        prefix: str,
        *,
        halving: SuccessiveHalving | None,
        keep_runs: bool,
    ) -> None:
        self._template = template
        self._data = data
        self._store = store
        self._space = space
        self._study = study
        self._metrics = metrics
        self._spark = spark
        self._prefix = prefix
        self._keep_runs = keep_runs
        epochs = template.getOrDefault(template.epochs)
        self._rungs = (epochs,) if halving is None else halving.rungs(epochs)
        self._shared = _SHARED_PARAMETERS if halving is None else (*_SHARED_PARAMETERS, "epochs")
        self._all_epochs: Mapping[str, object] = {} if halving is None else {"epochs": epochs}
        self._stops = threading.Event()
        self._changed = threading.Condition()  # guards the fields below, and the end of a trial
        self._ladder = Ladder(len(self._rungs), 2 if halving is None else halving.factor)
        self._left = 0  # the number of trials that have not started
        self._running = 0  # the number of attempts in progress
        self._fitting: set[int] = set()  # the threads that train, by ``threading.get_ident()``
        self._paused: dict[int, Attempt] = {}  # the last attempts of trials that may be promoted, by number
        self._models: dict[int, TrainedModel] = {}  # of the best trials so far, by number
        self._signs = [1 if direction.name == "MINIMIZE" else -1 for direction in study.directions]
        self._earlier: dict[int, DistributedEstimator] = {}  # of the best trials of an earlier search, by number
        # The runs of the best trials so far that are removed when other trials are better, by number.
        self._removable = {
            trial.number: trial.user_attrs[RUN_ID] for trial in self.best() if _KEEPS_RUN not in trial.user_attrs
        }

    def resume_interrupted(self) -> None:
        """Enqueue the interrupted trials of an earlier search again, with their runs.

        Also remove the runs that a killed search did not remove after their trials had ended.

        Raises:
            ParamError: the best model of the earlier search cannot be loaded.
        """
        from optuna.trial import TrialState, create_trial  # noqa: PLC0415  (optional)

        if self._trials():
            self._study.sampler.reseed_rng()  # a seeded sampler would repeat the parameters of the earlier trials
        self._earlier = {trial.number: self._resuming(trial) for trial in self.best()}
        last = {trial.user_attrs[RUN_ID]: trial for trial in self._trials() if RUN_ID in trial.user_attrs}
        best = {trial.user_attrs[RUN_ID] for trial in self.best()}
        for run_id in self._study.user_attrs.get(_REMOVABLE, ()):
            if run_id not in best and run_id in last and _has_ended(last[run_id]):
                self._remove(run_id)
        for trial in [*last.values(), *filter(self._was_asked_last, self._trials())]:
            run_id = trial.user_attrs.get(RUN_ID)
            if trial.state is TrialState.RUNNING:
                self._tell(trial.number, TrialState.FAIL)
            elif trial.state is not TrialState.FAIL:
                continue
            if _ERROR in trial.user_attrs:
                continue
            # The trial may have been interrupted before the space asked for all of its parameters.
            params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            # The other attributes are those of the sampler, such as the trial's place in a grid.
            attributes = {name: value for name, value in trial.system_attrs.items() if not name.startswith(CONSTRAINTS)}
            attributes["fixed_params"] = params
            self._study.add_trial(
                create_trial(
                    state=TrialState.WAITING,
                    system_attrs=attributes,
                    user_attrs={} if run_id is None else {RUN_ID: run_id},
                )
            )
            logger.info("trial %d was interrupted; its run %s is resumed", trial.number, run_id or "(not begun)")

    def run(self, limits: SearchLimits) -> None:
        """Run trials until their number or the time limit is reached.

        Raises:
            ParamError: an epoch does not report a metric.
            Exception: the error of a trial after the session was stopped.
        """
        self._left = limits.trials - sum(map(_has_ended, self._trials()))
        tag = new_tag()
        work = partial(self._run_attempts, tag, Deadline.after(limits.seconds or math.inf))
        threads: list[Future[None]] = []
        try:
            threads.extend(
                in_background(inheriting(self._spark, work), f"sparkhvd-search-{number}")
                for number in range(min(limits.parallelism, max(0, self._left)))
            )
            _wait_for(threads)
        except BaseException:
            self._stops.set()
            with self._changed:  # no launcher but those on Spark ends its ranks with the Spark jobs
                for thread in self._fitting:
                    raise_in_thread(thread, _InterruptedError)
            cancel(self._spark, tag, in_background(self._await_attempts, "sparkhvd-search-end"))
            for attempt in self._paused.values():
                self._interrupt(attempt)
            raise
        for attempt in self._paused.values():
            self._end(attempt, "PRUNED")

    def best_models(self) -> dict[int, TrainedModel]:
        """Return the models of the best trials by number. Models of an earlier search come from their finished runs.

        Raises:
            SearchError: no trial completed.
        """
        best = self.best()
        if not best:
            raise SearchError(self._why_none_completed())
        return {trial.number: self._models.get(trial.number) or self._trained_before(trial.number) for trial in best}

    def best(self) -> list[optuna.trial.FrozenTrial]:
        """Return the best of the trials that have a run."""
        return best_trials(self._trials(), self._signs)

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _why_none_completed(self) -> str:
        trials = self._trials()
        if not trials:
            return "No trial started within timeout, which counts after the rows are prepared. Allow more seconds."
        if any(trial.state.name == "COMPLETE" and RUN_ID in trial.user_attrs for trial in trials):
            return (
                f"None of {counted(len(trials), 'trial')} completed within the constraints of the sampler or the space."
            )
        errors = [(trial.number, trial.user_attrs[_ERROR]) for trial in trials if _ERROR in trial.user_attrs]
        reason = f" Trial {errors[0][0]} failed: {errors[0][1]}" if errors else " The pruner or the space pruned them."
        return f"None of {counted(len(trials), 'trial')} completed.{reason}"

    def _run_attempts(self, tag: str, end: Deadline) -> None:
        add_tag(self._spark, tag)
        while (attempt := self._next(end)) is not None:
            try:
                self._run_attempt(attempt)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _next(self, end: Deadline) -> Attempt | None:
        """Return a promoted trial, or else a new one; None when the search is over."""
        with self._changed:
            while not self._stops.is_set():
                starts = self._left > 0 and not end.expired()
                promoted = self._ladder.promote(is_closed=not starts and self._running == 0)
                if promoted is not None or starts:
                    attempt = (
                        self._new() if promoted is None else replace(self._paused.pop(promoted[0]), rung=promoted[1])
                    )
                    self._running += 1  # only now, because Optuna's storage may fail
                    return attempt
                if self._running == 0:
                    break
                self._changed.wait(_POLL_SECONDS)
        return None

    def _new(self) -> Attempt:
        refuse_taken_over(self._study, self._store)
        self._left -= 1
        self._study.set_user_attr(_ASKING, datetime.now().isoformat())  # noqa: DTZ005  (as Optuna)
        trial = self._study.ask()
        run_id = trial.user_attrs.get(RUN_ID) or f"{self._prefix}-{trial.number:04d}"
        if self._keep_runs:
            trial.set_user_attr(_KEEPS_RUN, value=True)
        trial.set_user_attr(RUN_ID, run_id)
        return Attempt(trial, run_id, TrialReports(trial, *self._metrics))

    def _was_asked_last(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Return whether a search was killed after it had asked for this trial and before the trial had a run.

        Other programs may run trials of the study, too, but they ask for parameters.
        """
        asking, started = self._study.user_attrs.get(_ASKING), trial.datetime_start
        if trial.state.name != "RUNNING" or trial.user_attrs or trial.params or asking is None or started is None:
            return False
        asked = datetime.fromisoformat(asking)
        return started >= (asked if started.microsecond else asked.replace(microsecond=0))  # MySQL stores no fractions

    def _run_attempt(self, attempt: Attempt) -> None:
        import optuna  # noqa: PLC0415  (optional)

        trial = attempt.trial
        try:
            if attempt.parameters is None:
                attempt = replace(attempt, parameters=self._checked(self._space(trial)))
            candidate = self._candidate(attempt)
            candidate.setParams(epoch_callback=self._callback(attempt.reports))
            with self._interruptible():
                model = candidate.fit_on_parquet(dataset_idx=self._data)
            is_last = attempt.rung + 1 == len(self._rungs)
            record = _record_of(model, candidate, None if is_last else self._rungs[attempt.rung])
            values = metrics_of(metric_values(record), self._metrics)
        except optuna.TrialPruned:  # by the space
            self._end(attempt, "PRUNED")
        except (Exception, _InterruptedError) as error:
            if self._stops.is_set() or is_stopped(self._spark):
                self._interrupt(attempt)
                raise
            self._fail(attempt, f"{type(error).__name__}: {error}", ends_search=isinstance(error, SearchArgumentError))
            if isinstance(error, SearchArgumentError):
                raise
        else:
            if attempt.reports.is_pruned:
                self._end(attempt, "PRUNED")
            elif not all(map(math.isfinite, values)):
                self._fail(attempt, f"{', '.join(self._metrics)} of the trained model is not finite: {values}")
            elif is_last:
                self._end(attempt, "COMPLETE", values, model)
            else:
                self._pause(attempt, values)

    def _await_attempts(self) -> None:
        """Wait until no attempt is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let an interrupt of the search interrupt this thread within this block."""
        thread = threading.get_ident()
        with self._changed:
            if self._stops.is_set():
                raise _InterruptedError
            self._fitting.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._fitting.discard(thread)

    def _checked(self, parameters: object) -> Mapping[str, object]:
        if not isinstance(parameters, Mapping):
            raise SearchArgumentError(
                f"space returned {parameters!r:.200}; it must return parameters of the estimator by name."
            )
        for name in self._shared:
            if name in parameters:
                raise SearchArgumentError(f"space returned {name}, which all trials share. Set it on the estimator.")
        try:
            self._template.copy().setParams(**dict.fromkeys(parameters))
        except TypeError as error:
            raise SearchArgumentError(f"space returned an unknown parameter: {error}") from error
        return parameters

    def _candidate(self, attempt: Attempt) -> DistributedEstimator:
        """Return the estimator that trains a trial up to the rung."""
        named = {f"trial.{name}": value for name, value in attempt.trial.params.items()}
        # MLflow shows the epochs of the last rung, because a promoted trial continues its run there.
        candidate = self._template.as_trial(f"trial {attempt.trial.number}", {**named, **self._all_epochs})
        candidate.setParams(verbose=0)  # the lines of parallel trials would not name their trial
        candidate.setParams(**dict.fromkeys(_ROW_PARAMETERS), **(attempt.parameters or {}), run_id=attempt.run_id)
        if len(self._rungs) > 1:
            candidate.setParams(epochs=self._rungs[attempt.rung])
        return candidate

    def _callback(self, reports: TrialReports) -> Callable[[int, Mapping[str, float]], bool]:
        own: Callable[[int, Mapping[str, float]], object] | None = self._template.getOrDefault("epoch_callback")

        def report(epoch: int, values: Mapping[str, float]) -> bool:
            if self._stops.is_set():
                raise SearchError("The search was interrupted.")
            ends = reports(epoch, values)
            return ends if own is None else requests_end(own(epoch, values)) or ends

        return report

    def _trained_before(self, number: int) -> TrainedModel:
        """Return the model of a trial that an earlier search completed; its run is not trained again."""
        return self._earlier[number].fit_on_parquet(dataset_idx=self._data)

    def _resuming(self, trial: optuna.trial.FrozenTrial) -> DistributedEstimator:
        """Return the estimator that resumes the finished run of a trial of an earlier search.

        Raises:
            ParamError: the run is gone, or the space has no such trial.
        """
        import optuna  # noqa: PLC0415  (optional)

        run_id = trial.user_attrs[RUN_ID]
        path = checkpoint.latest(self._store, run_id)
        if path is None:
            raise ParamError(
                f"The run {run_id} of the best trial so far, number {trial.number}, is not in {self._store.url}. Use "
                "the Store of the earlier search, or another study_name."
            )
        fixed = cast("optuna.Trial", optuna.trial.FixedTrial(trial.params, number=trial.number))
        try:
            parameters = self._checked(self._space(fixed))
        except ValueError as error:  # from FixedTrial
            raise ParamError(
                f"The space does not fit the best trial so far, number {trial.number} with {trial.params}: {error} Use "
                "the space of the earlier search, or another study_name."
            ) from error
        candidate = self._candidate(Attempt(fixed, run_id, TrialReports(fixed), 0, parameters))
        # The estimator trains no further epoch and reports no epoch again.
        candidate.setParams(epochs=checkpoint.load(self._store, path).epoch + 1, epoch_callback=None)
        return candidate

    def _pause(self, attempt: Attempt, values: Sequence[float]) -> None:
        """Keep a trial that has reached its rung until it is promoted, or until the end."""
        with self._changed:
            self._paused[attempt.trial.number] = attempt
            self._ladder.reach(attempt.rung, attempt.trial.number, self._signs[0] * values[0])

    def _interrupt(self, attempt: Attempt) -> None:
        """End a trial without a reason, so that the next search resumes it."""
        from optuna.trial import TrialState  # noqa: PLC0415  (optional)

        self._tell(attempt.trial.number, TrialState.FAIL)

    def _fail(self, attempt: Attempt, reason: str, *, ends_search: bool = False) -> None:
        if not ends_search:
            logger.warning("trial %d failed, and the search continues: %s", attempt.trial.number, reason)
        self._end(attempt, "FAIL", error=reason[:_ERROR_LIMIT])

    def _end(
        self,
        attempt: Attempt,
        state: Literal["COMPLETE", "PRUNED", "FAIL"],
        values: Sequence[float] | None = None,
        model: TrainedModel | None = None,
        error: str | None = None,
    ) -> None:
        """Report to Optuna how a trial ended, and remove the runs that are no longer among the best."""
        import optuna  # noqa: PLC0415  (optional)

        with self._changed:
            if not self._keep_runs:  # stored first, for the search that follows if this one is killed
                self._removable[attempt.trial.number] = attempt.run_id
                self._study.set_user_attr(_REMOVABLE, list(self._removable.values()))
            if error is not None:
                attempt.trial.set_user_attr(_ERROR, error)
            self._tell(attempt.trial.number, optuna.trial.TrialState[state], values)
            if state != "COMPLETE":
                self._ladder.drop(attempt.trial.number)
            # Optuna logs the trials of an objective; as with those, optuna.logging.set_verbosity hides this line.
            shown = attempt.reports.last if values is None else values
            metrics = ", ".join(f"{name} {value:.6g}" for name, value in zip(self._metrics, shown, strict=False))
            optuna.logging.get_logger("optuna.sparkhvd").info(
                "Trial %d %s: %s %s", attempt.trial.number, _OUTCOMES[state], metrics, attempt.trial.params
            )
            if model is not None:
                self._models[attempt.trial.number] = model
            best = {trial.number for trial in self.best()}
            for number in self._models.keys() - best:
                del self._models[number]
            for number in self._removable.keys() - best:
                self._remove(self._removable.pop(number))

    def _tell(self, number: int, state: optuna.trial.TrialState, values: Sequence[float] | None = None) -> None:
        from optuna.trial import TrialState  # noqa: PLC0415  (optional)

        try:
            self._study.tell(number, values, state=state)
        except RuntimeError:  # from Study.stop, which a sampler with a finite number of trials calls after its last one
            stored = next(trial for trial in self._trials() if trial.number == number)
            if stored.state is not state:
                raise
            resumed = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            self._left = min(self._left, len(resumed))  # which the sampler counts as ended

    def _remove(self, run_id: str) -> None:
        try:
            self._store.delete(layout.run_folder(run_id))
        except StoreError as error:  # a leftover must not end the search
            logger.warning("Run %s could not be removed from %s: %s", run_id, self._store.url, error)


def _has_ended(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial has completed, was pruned or has failed; an interrupted trial has not ended."""
    from optuna.trial import TrialState  # noqa: PLC0415  (optional)

    return trial.state in {TrialState.COMPLETE, TrialState.PRUNED} or _ERROR in trial.user_attrs


def _record_of(model: TrainedModel, estimator: DistributedEstimator, epochs: int | None) -> EpochRecord:
    """Return the record of the epoch whose model a fit of ``epochs`` epochs returns; None means all epochs.

    The run may have more epochs, because a killed search trained it further.
    """
    history = model.trained.history[:epochs]
    best = estimator.getOrDefault(estimator.checkpoints).best_epoch(history)
    return history[-1 if best is None else best]


def _wait_for(threads: Sequence[Future[None]]) -> None:
    """Wait until all threads have ended; raise the first error."""
    running: Sequence[Future[None]] = threads
    while running:  # in short waits, which Ctrl-C interrupts
        done = wait(running, _POLL_SECONDS, FIRST_EXCEPTION).done
        for thread in done:
            thread.result()
        running = [thread for thread in running if thread not in done]
