"""``KerasEstimator`` and ``KerasModel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparkhvd.errors import ParamError
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.keras.plugin import use_backend
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.params.declarations import Declared, declared
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.params import objects, objects_or_named, positive_integer, shapes
from sparkhvd.estimators.training.job_files import local_copies

if TYPE_CHECKING:
    import keras

_PLUGIN = "sparkhvd.estimators.keras.plugin:PLUGIN"


def _mapping(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name} must be a dict from names to objects, got {value!r}.")
    return dict(value)


class KerasModel(TrainedModel):
    """A trained ``keras.Model`` as a Spark Transformer."""

    plugin: ClassVar[str] = _PLUGIN

    def getModel(self) -> keras.Model:  # noqa: N802  (Horovod's name)
        """Return the trained model, compiled, with the state of its optimizer; every call returns a new copy."""
        with local_copies(self.file_source, self._trained.files) as folder:
            use_backend(artifact.load_backend(folder))
            return artifact.load_model(folder, compiled=True)


class KerasEstimator(DistributedEstimator):
    """Trains a ``keras.Model`` on a Spark DataFrame, with one process per rank.

    Works with Keras 3 on the TensorFlow and PyTorch backends; the ranks use the driver's backend. Every
    parameter has a setter and a getter (``setBatchSize``, ``getBatchSize``). ``sparkhvd.estimators.keras.inputs``
    documents the mapping of columns to inputs and targets. The model and the optimizer that you pass are not changed.

    Examples:
        >>> estimator = KerasEstimator(
        ...     num_proc=2,
        ...     store=Store.create("/tmp/experiments"),
        ...     model=keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activation="softmax")]),
        ...     optimizer=keras.optimizers.Adam(),
        ...     loss="sparse_categorical_crossentropy",
        ...     metrics=["accuracy"],
        ...     feature_cols=["pixels"],
        ...     label_cols=["digit"],
        ...     epochs=3,
        ... )
        >>> predicted = estimator.fit(train_df).transform(test_df)  # doctest: +SKIP
    """

    plugin: ClassVar[str] = _PLUGIN
    model_class: ClassVar[type[TrainedModel]] = KerasModel
    preload: ClassVar[tuple[str, ...]] = (
        "keras",
        "sparkhvd.estimators.keras.trainer",
        "sparkhvd.estimators.keras.plugin",
        "sparkhvd.estimators.training.worker",
    )
    required: ClassVar[tuple[str, ...]] = ("model", "loss", "feature_cols", "label_cols")

    model: Declared[keras.Model | None] = declared("The model to train; it is copied, not changed.", default=None)
    optimizer: Declared[keras.optimizers.Optimizer | str | None] = declared(
        "The optimizer or its name; by default the one that the model was compiled with.", default=None
    )
    loss: Declared[object] = declared(
        "The loss, as for model.compile: a name, a function, a Loss, or one per output.", default=None
    )
    loss_weights: Declared[Sequence[float] | None] = declared("The loss weights, as for model.compile.", default=None)
    metrics: Declared[Sequence[object] | Mapping[str, object] | None] = declared(
        "The metrics, as for model.compile: a list, or a dict by output.", objects_or_named, default=None
    )
    callbacks: Declared[Sequence[keras.callbacks.Callback] | None] = declared(
        "Keras callbacks, which run on every rank; the logs that they receive are averaged over the ranks.",
        objects,
        default=None,
    )
    custom_objects: Declared[Mapping[str, object] | None] = declared(
        "Custom classes and functions that the model uses, by name; those of its layers are detected automatically.",
        _mapping,
        default=None,
    )
    input_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every feature column, with or without a leading -1 for the rows.", shapes, default=None
    )
    label_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every label column; by default the output's shape if it has as many elements. A "
        "subclassed model, which declares no outputs, receives the shape of the column.",
        shapes,
        default=None,
    )

    checkpoint_callback: Declared[keras.callbacks.ModelCheckpoint | None] = declared(
        "A keras.callbacks.ModelCheckpoint, which runs on rank 0. Its files are kept in the run's folder of the Store. "
        "With save_best_only, the trained model is that of the best epoch.",
        default=None,
    )
    backward_passes_per_step: Declared[int] = declared(
        "Batches per rank whose gradients are averaged, over all their rows, for one step.",
        positive_integer,
        default=1,
    )

    def _checked_plan(self, **overrides: object) -> FitPlan:
        plan = super()._checked_plan(**overrides)
        if plan.own["checkpoint_callback"] is None:
            return plan
        from sparkhvd.estimators.keras.serialization.saving import with_callback  # noqa: PLC0415  (Keras is imported by now)

        return with_callback(plan)

    def _pickled(self, objects: dict[str, Any]) -> bytes:
        if "model" not in objects:
            return super()._pickled(objects)
        from sparkhvd.estimators.keras.serialization.package import custom_objects_of, dumps_params  # noqa: PLC0415  (imports Keras)

        custom = custom_objects_of(objects["model"], objects.get("custom_objects"))
        return dumps_params(custom, objects)

    def _environment(self) -> dict[str, str | None]:
        import keras  # noqa: PLC0415  (the user has created a model, so Keras is imported)

        return {"KERAS_BACKEND": keras.config.backend(), "TF_CPP_MIN_LOG_LEVEL": "2"}
