"""``minimize`` and ``maximize``: a search whose trials are fits of one estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.data.spark.settings import with_spark_credentials
from sparkhvd.errors import ParamError, SearchError
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.training.sample_rows import require_spark_dataframe
from sparkhvd.store.protocol import Store
from sparkhvd.tune.halving import SuccessiveHalving
from sparkhvd.tune.study import (
    Direction,
    StudySettings,
    check_comparable,
    held,
    naming_storage,
    refuse_running_elsewhere,
    run_prefix,
    seed_of,
    warn_of_other_rows,
)
from sparkhvd.tune.trials import SearchLimits, Space, Trials

if TYPE_CHECKING:
    import optuna
    from pyspark.sql import DataFrame

    from sparkhvd.estimators.models.model import TrainedModel


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        study: Optuna's study, with all trials.
        best_trials: the best trials, by number: one, or the Pareto front of several metrics.
        models: their trained models, by number.
    """

    study: optuna.Study
    best_trials: Mapping[int, optuna.trial.FrozenTrial]
    models: Mapping[int, TrainedModel]

    @property
    def best_trial(self) -> optuna.trial.FrozenTrial:
        """Return the best trial.

        Raises:
            SearchError: the search is by several metrics, and several trials are the best.
        """
        if len(self.best_trials) > 1:
            raise SearchError(
                f"A search by several metrics has several best trials: {list(self.best_trials)}. Choose one of them in "
                "best_trials and models."
            )
        return next(iter(self.best_trials.values()))

    @property
    def best_model(self) -> TrainedModel:
        """Return the model of ``best_trial``."""
        return self.models[self.best_trial.number]

    @property
    def best_params(self) -> dict[str, Any]:
        """Return the parameters that Optuna suggested to ``best_trial``."""
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        """Return the metric of ``best_model``; the first metric if there are several."""
        return float(self.best_trial.values[0])


@brief_errors
def minimize(
    estimator: DistributedEstimator,
    df: DataFrame,
    space: Space,
    n_trials: int,
    *,
    metric: str | Sequence[str] = "val_loss",
    parallelism: int = 1,
    storage: str | optuna.storages.BaseStorage | None = None,
    study_name: str | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    halving: SuccessiveHalving | None = None,
    timeout: float | None = None,
    keep_runs: bool = False,
) -> SearchResult:
    """Search the parameters of an estimator for the smallest value of a metric.

    The rows are prepared once. Every trial is a fit with a run of its own in the estimator's Store. Its epochs are
    reported to Optuna while it trains, and a pruned trial ends after the epoch. The failure of a trial is logged with
    its reason, and the search continues. A call with the ``storage`` and ``study_name`` of an interrupted search
    continues it: interrupted trials resume from their last checkpoints.

    Args:
        estimator: the estimator, with a Store.
        df: the rows.
        space: a function that takes the trial and returns parameters of the estimator by name, such as
            ``{"batch_size": trial.suggest_int("batch_size", 16, 128)}``.
        n_trials: the number of trials of the study, including those of earlier calls.
        metric: the metric of the trained model, named as in ``EarlyStopping``; several metrics are optimized together.
        parallelism: the number of trials that run at the same time. They wait for each other if slots are short.
        storage: the storage in which Optuna keeps the study, such as ``sqlite:///search.db``; None keeps it in memory.
        study_name: the name of the study, with which the ids of its runs begin; needed with ``storage``.
        sampler: Optuna's sampler; None means its default.
        pruner: Optuna's pruner; None means its default.
        halving: trains all trials for a few epochs, and only the best of them further; None trains all to the end.
        timeout: seconds, counted after the rows are prepared, after which no further trial starts; None sets no limit.
        keep_runs: whether the Store keeps the runs of all trials; False keeps the runs of the best trials.

    Raises:
        ParamError: an argument or a parameter of the estimator cannot work, or an epoch does not report the metric.
        SearchError: no trial completed, or Optuna's storage failed.
        SparkHvdError: the rows cannot be prepared.

    Examples:
        >>> result = minimize(estimator, df, space, n_trials=20, parallelism=2)  # doctest: +SKIP
        >>> result.best_model.transform(df)  # doctest: +SKIP
    """
    settings = StudySettings(storage, study_name, sampler, pruner)
    limits = SearchLimits(n_trials, parallelism, timeout)
    return _search(estimator, df, space, metric, "minimize", settings, limits, halving=halving, keep_runs=keep_runs)


@brief_errors
def maximize(
    estimator: DistributedEstimator,
    df: DataFrame,
    space: Space,
    n_trials: int,
    *,
    metric: str | Sequence[str],
    parallelism: int = 1,
    storage: str | optuna.storages.BaseStorage | None = None,
    study_name: str | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    halving: SuccessiveHalving | None = None,
    timeout: float | None = None,
    keep_runs: bool = False,
) -> SearchResult:
    """Search the parameters of an estimator for the largest value of a metric, such as ``val_accuracy``.

    The arguments, the result and the errors are the same as in ``minimize``.
    """
    settings = StudySettings(storage, study_name, sampler, pruner)
    limits = SearchLimits(n_trials, parallelism, timeout)
    return _search(estimator, df, space, metric, "maximize", settings, limits, halving=halving, keep_runs=keep_runs)


def _search(  # noqa: PLR0917
    estimator: DistributedEstimator,
    df: DataFrame,
    space: Space,
    metric: str | Sequence[str],
    direction: Direction,
    settings: StudySettings,
    limits: SearchLimits,
    *,
    halving: SuccessiveHalving | None,
    keep_runs: bool,
) -> SearchResult:
    require_spark_dataframe(direction, df)
    metrics = (metric,) if isinstance(metric, str) else tuple(metric) if isinstance(metric, Sequence) else ()
    if halving is not None and not isinstance(halving, SuccessiveHalving):
        raise ParamError(f"halving={halving!r:.200} must be a SuccessiveHalving, or None.")
    if halving is not None and len(metrics) > 1:
        raise ParamError("halving compares trials by one metric, but the search has several. Leave one of them out.")
    own_store, spark = _checked_store(estimator, space, metrics), df.sparkSession
    store = with_spark_credentials(own_store, spark)
    with ExitStack() as stack:
        study = stack.enter_context(settings.opened([direction] * len(metrics)))
        stack.enter_context(held(store, study.study_name))
        prefix = run_prefix(study)
        template = estimator.copy()  # in this thread, whose MLflow run the trials belong to
        template.setParams(random_seed=seed_of(study, estimator.getOrDefault(estimator.random_seed)))
        if settings.storage is None and estimator.getOrDefault(estimator.random_seed) is None:
            template.setParams(keep_data=0)  # no later search has this seed
        data = stack.enter_context(template.prepare(df))
        if data.validation_rows == 0 and (unknown := [name for name in metrics if name.startswith("val_")]):
            raise ParamError(
                f"The search optimizes {unknown[0]!r}, but there are no validation rows. Set the estimator's "
                "validation, or search by another metric."
            )
        facts = {
            "metrics": list(metrics),
            "random_seed": template.getOrDefault(template.random_seed),
            "validation": template.getOrDefault(template.validation),
            "rows": [data.train_rows, data.validation_rows],
            "label ranges": {name: [smallest, largest] for name, smallest, largest in data.manifest.labels},
        }
        check_comparable(study, facts)
        warn_of_other_rows(study, data.manifest.fingerprint)
        refuse_running_elsewhere(study, store)
        trials = Trials(
            template, data, store, space, study, metrics, spark, prefix, halving=halving, keep_runs=keep_runs
        )
        with naming_storage(study):
            trials.resume_interrupted()
            trials.run(limits)
        models = trials.best_models()
        return SearchResult(study, {trial.number: trial for trial in trials.best()}, models)


def _checked_store(estimator: object, space: object, metrics: Sequence[object]) -> Store:
    """Return the Store of a search; refuse arguments that cannot work."""
    if not isinstance(estimator, DistributedEstimator):
        raise ParamError(
            f"estimator={estimator!r:.200} must be a TorchEstimator, KerasEstimator or LightningEstimator."
        )
    if not callable(space):
        raise ParamError(f"space={space!r:.200} must be a function that gets a trial and returns parameters by name.")
    named = bool(metrics) and all(isinstance(name, str) for name in metrics)
    if not named or len(set(metrics)) < len(metrics):
        raise ParamError("metric must be the name of a metric, such as 'val_loss', or several different names.")
    store: Store | None = estimator.getOrDefault(estimator.store)
    if store is None or not store.save_runs:
        raise ParamError(
            "A search keeps the prepared rows and its trials in a Store that saves runs: set the estimator's store."
        )
    for name in ("run_id", "resume"):
        if estimator.getOrDefault(name) is not None:
            raise ParamError(f"Every trial of a search has a run of its own. Leave the estimator's {name} out.")
    return store
