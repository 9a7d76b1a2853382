"""The estimators' plug-in for Lightning."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch

from sparkhvd._util.counts import counted
from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.data.loaders.user_loaders import loads_rows
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import DataError, ModelOutputError, ParamError
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.lightning.checkpoint import best_model
from sparkhvd.estimators.lightning.package import LightningPackage
from sparkhvd.estimators.lightning.params import LightningParams
from sparkhvd.estimators.lightning.steps import refuse_unscalable
from sparkhvd.estimators.lightning.trainer import LightningTrainer
from sparkhvd.estimators.params.backend import Placement, is_elastic
from sparkhvd.estimators.params.policies import check_monitored, monitored_metrics
from sparkhvd.estimators.plugin import ON_CPU, Inference, TrainSpec, typed_params
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.estimators.torch.batch_normalization import batch_dependence_of
from sparkhvd.estimators.torch.checkpoint.safe_state import refuse_unsafe_model
from sparkhvd.estimators.torch.inputs import called_in_order
from sparkhvd.estimators.torch.losses.divisors import inexact_losses
from sparkhvd.estimators.torch.losses.objective import objective_of
from sparkhvd.estimators.torch.plugin import PLUGIN as TORCH
from sparkhvd.estimators.torch.plugin import (
    TorchPredictor,
    check_optimizer,
    compressor,
    module_facts,
    refuse_closure,
    refuse_exported,
    refuse_unsupported_parameters,
    warn_of_inexact_losses,
)
from sparkhvd.estimators.torch.serialization.package import dumps, refuse_separated
from sparkhvd.estimators.torch.steps import outputs_of
from sparkhvd.estimators.torch.synthetic_rows import fails_by_shape
from sparkhvd.estimators.training.synthetic_rows import at_least_two_rows
from sparkhvd.estimators.training.user_errors import describe_error, pickling
from sparkhvd.lightning.flavour import FlavourName, default_flavour, flavour_of, import_lightning
from sparkhvd.world import World

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SYNTHETIC_ROWS = 2
_PLAIN_MODULE_PARAMS = ("loss", "loss_weights", "metrics")
# The Trainer's precisions that convert the weights, and the type of the converted weights.
_CONVERTING_PRECISIONS = {"64": "float64", "64-true": "float64", "16-true": "float16", "bf16-true": "bfloat16"}
# Trainer arguments that the estimator sets, and the parameter to use instead.
_ESTIMATOR_ARGUMENTS = {
    "strategy": "num_proc",
    "devices": "num_proc",
    "num_nodes": "num_proc",
    "max_epochs": "epochs",
    "callbacks": "callbacks",
    "logger": "logger",
    "use_distributed_sampler": "data_module",
    "enable_checkpointing": "checkpoints",
}


class LightningPlugin:
    """Trains LightningModules, and plain modules with a loss and an optimizer."""

    takes_texts = False

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.check``; runs a copy of the model in evaluation mode, without gradients.

        Raises:
            ParamError: a parameter has the wrong type, or the objects cannot be sent to the ranks.
            ModelOutputError: ``forward`` cannot take such rows, or does not return one output per label.
        """
        _check_types(params)
        _check_callbacks(typed_params(LightningParams, params).callbacks or (), has_logger=bool(params["logger"]))
        payload = self.pack({**params, "schema": schema})
        if flavour_of(params["model"]) is None:  # a LightningModule's metrics are known only when it logs them
            objective = objective_of(params)
            check_monitored(self.monitors(params), objective.names())
            warn_of_inexact_losses(inexact_losses(objective, schema))
        are_shapes_known = all(column.shape is not None for column in schema.columns)
        if rows is None and not are_shapes_known:
            return []
        scaled = bool(params.get("scale_lr"))
        if rows is not None:
            return _try_out(payload, schema, rows, scaled=scaled)
        synthetic_rows = {column.name: columns.blank(column, _SYNTHETIC_ROWS) for column in schema.columns}
        return _try_out(payload, schema, synthetic_rows, synthetic=True, scaled=scaled)

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.try_out``.

        Raises:
            ModelOutputError: see ``check``.
        """
        return _try_out(payload, schema, rows)

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        """Return the columns of each input and output, for the log."""
        return TORCH.mapping(params, schema)

    def pack(self, params: Mapping[str, object]) -> bytes:
        """Return the model and everything that the Trainer needs in one pickle."""
        own = typed_params(LightningParams, params)
        model = own.model
        plain = flavour_of(model) is None
        package = LightningPackage(
            model=model,
            optimizers=_optimizers(params),
            objective=objective_of(params) if plain else None,
            input_shapes=own.input_shapes,
            label_shapes=own.label_shapes,
            batch_format=str(params["batch_format"]),
            callbacks=tuple(own.callbacks or ()),
            logger=params["logger"],
            trainer_args=dict(own.trainer_args or {}),
            data_module=_data_module_factory(params),
            compression=compressor(params.get("gradient_compression")),
            named_inputs=own.inputs,
        )
        advice = "Create objects that cannot be pickled (locks, open files, sessions) in a hook such as setup()."
        with pickling("The model, callbacks, logger, trainer_args or data_module", advice=advice):
            return dumps(package)

    def monitors(self, params: Mapping[str, object]) -> Mapping[str, str]:
        """See ``FrameworkPlugin.monitors``."""
        return monitored_metrics(params)

    def batch_dependence(self, params: Mapping[str, object]) -> BatchDependence:
        """See ``FrameworkPlugin.batch_dependence``; the Trainer may synchronize the layers itself."""
        layers = batch_dependence_of(params["model"], keeps_modes=True)
        trainer_args = typed_params(LightningParams, params).trainer_args or {}
        return replace(layers, local=()) if trainer_args.get("sync_batchnorm") else layers

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        """See ``FrameworkPlugin.facts``; a LightningModule creates its optimizers on the ranks."""
        _check_types(params)
        model, optimizer = typed_params(LightningParams, params).model, params["optimizer"]
        known = optimizer if flavour_of(model) is None and isinstance(optimizer, torch.optim.Optimizer) else None
        facts = module_facts("Lightning", model, known)
        dtype = _dtype_in_training(params.get("trainer_args"))
        if dtype is None:
            return facts
        converted = {name: dtype for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        return replace(facts, dtypes={**facts.dtypes, **converted})

    def packages(self) -> tuple[str, ...]:
        """See ``FrameworkPlugin.packages``; a module may subclass the classes of either Lightning."""
        return ("torch", "lightning", "pytorch_lightning")

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> LightningTrainer:
        """Return the trainer of one rank."""
        return LightningTrainer(unpack(payload), spec, world)

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        """Write the model of ``params`` without an optimizer."""
        TORCH.export(params, schema, folder)

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> TorchPredictor:
        """Return the model from a folder that ``LightningTrainer.export`` wrote, on the assigned GPU, if any."""
        return TORCH.predictor(folder, inference)


PLUGIN = LightningPlugin()


def _dtype_in_training(trainer_args: object) -> str | None:
    """Return the type to which the Trainer's precision converts the weights; None if they keep theirs."""
    arguments = trainer_args if isinstance(trainer_args, Mapping) else {}
    plugins = arguments.get("plugins") or ()
    chosen = [arguments.get("precision"), *(plugins if isinstance(plugins, list | tuple) else [plugins])]
    names = (str(getattr(one, "precision", one)) for one in chosen)
    return next((_CONVERTING_PRECISIONS[name] for name in names if name in _CONVERTING_PRECISIONS), None)


def unpack(payload: bytes) -> LightningPackage:
    """Return the package from the result of ``LightningPlugin.pack``."""
    package: LightningPackage = cloudpickle.loads(payload)
    refuse_separated(package.model, package.optimizers)
    return package


def _optimizers(params: Mapping[str, object]) -> tuple[torch.optim.Optimizer, ...]:
    optimizer = params["optimizer"]
    return tuple(optimizer) if isinstance(optimizer, list | tuple) else () if optimizer is None else (optimizer,)  # type: ignore[return-value]


def _data_module_factory(params: Mapping[str, object]) -> Callable[..., object] | None:
    """Return the function that creates the LightningDataModule; None for a module that replaces the readers."""
    data_module = typed_params(LightningParams, params).data_module
    return None if loads_rows(data_module) else data_module


def _check_types(params: Mapping[str, object]) -> None:
    model = params["model"]
    if not isinstance(model, torch.nn.Module):
        raise ParamError(
            f"model is a {type(model).__name__}; it must be a LightningModule or a torch.nn.Module."
            f"{estimator_hint(model, ())}"
        )
    refuse_exported(model)
    flavour = flavour_of(model)
    refuse_unsafe_model(model)
    refuse_unsupported_parameters(model, may_be_lazy=flavour is not None and _has_setup(model, flavour))
    if flavour is not None:
        _check_hooks(model, flavour)
        if params.get("inputs"):
            raise ParamError(
                "inputs is only for plain modules; a LightningModule receives its columns in the form that "
                "batch_format sets. Leave inputs out, and list the columns in feature_cols."
            )
        for name in _PLAIN_MODULE_PARAMS:
            if params.get(name) not in (None, (), [], {}):
                raise ParamError(
                    f"{name} is only for plain modules; a LightningModule computes its own in training_step. Leave "
                    f"{name} out."
                )
    else:
        for name in ("optimizer", "loss"):
            if params.get(name) is None:
                raise ParamError(
                    f"model is a plain {type(model).__name__}, which needs {name}=; only a LightningModule defines its "
                    "own."
                )
        if isinstance(params["optimizer"], list | tuple):
            raise ParamError(
                "optimizer is a list; a plain module takes one optimizer, and only a LightningModule may have several."
            )
    for optimizer in _optimizers(params):
        check_optimizer(optimizer, model)
    own = typed_params(LightningParams, params)
    _check_flavour("callbacks", "callback", own.callbacks or (), flavour)
    _check_flavour("logger", "logger", _loggers(params["logger"]), flavour)
    _check_one_best(params)
    _check_trainer_args(own.trainer_args or {}, params)


def _check_callbacks(callbacks: Sequence[object], *, has_logger: bool) -> None:
    for callback in callbacks:
        if _is_any(callback, {"BatchSizeFinder"}):
            raise ParamError(
                f"callbacks holds a {type(callback).__name__}, but the estimator's batches have the size that its "
                "parameter batch_size sets. Leave the callback out."
            )
        if needs_logger(callback) and not has_logger:
            raise ParamError(
                f"callbacks holds a {type(callback).__name__}, which needs a logger. Pass one, such as "
                "logger=CSVLogger('logs')."
            )


def needs_logger(callback: object) -> bool:
    """Return whether a callback of Lightning refuses a Trainer without a logger."""
    return _is_any(callback, {"DeviceStatsMonitor", "LearningRateMonitor"})


def _is_any(callback: object, names: Set[str]) -> bool:
    """Return whether a callback is of a class with one of these names, under any name of Lightning."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def _check_one_best(params: Mapping[str, object]) -> None:
    """Refuse two settings that choose the epoch whose model is returned."""
    own = typed_params(LightningParams, params)
    best, choosing = own.checkpoints.best, best_model.choosing_callbacks(own.callbacks or ())
    if best is not None and choosing:
        raise ParamError(
            f"Both checkpoints=Checkpoints(best={best!r}) and ModelCheckpoint(monitor={choosing[0].monitor!r}) in "
            "callbacks choose the epoch whose model is returned; leave one of them out."
        )


def _loggers(logger: object) -> Sequence[object]:
    """Return the logger objects; the Trainer also takes True and False."""
    parts = logger if isinstance(logger, list | tuple) else [logger]
    return [part for part in parts if part is not None and not isinstance(part, bool)]


def _check_flavour(name: str, kind: str, objects: Sequence[object], flavour: FlavourName | None) -> None:
    for part in objects:
        other = flavour_of(part)
        if other is None or (flavour is not None and other != flavour):
            raise ParamError(
                f"{name} holds a {type(part).__name__}, which is not a {kind} of {flavour or 'Lightning'}"
                + (f" but of {other}; import both from the same package." if other else ".")
            )


def _has_setup(model: torch.nn.Module, flavour: FlavourName) -> bool:
    """Return whether a LightningModule has a hook that may create parameters before rank 0 broadcasts them."""
    return any(_overrides(model, flavour, name) for name in ("setup", "configure_model"))


def _overrides(model: torch.nn.Module, flavour: FlavourName, name: str) -> bool:
    return getattr(type(model), name) is not getattr(import_lightning(flavour).LightningModule, name)


def _check_hooks(model: torch.nn.Module, flavour: FlavourName) -> None:
    for name in ("training_step", "configure_optimizers"):
        inherited = getattr(import_lightning(flavour).LightningModule, name)
        if getattr(type(model), name) is inherited and name not in vars(model):
            raise ParamError(f"{type(model).__name__} has no {name}, which Lightning needs for training; define it.")
    for name in ("training_step", "validation_step"):
        if "dataloader_iter" in inspect.signature(getattr(model, name)).parameters:
            raise ParamError(
                f"{name} of {type(model).__name__} takes a dataloader_iter, from which it fetches batches itself, so "
                "their weights are not known before the step. Take batch and batch_idx instead."
            )


def _check_trainer_args(trainer_args: Mapping[str, object], params: Mapping[str, object]) -> None:
    if not trainer_args:
        return
    for name, instead in _ESTIMATOR_ARGUMENTS.items():
        if name in trainer_args:
            raise ParamError(f"trainer_args has {name!r}, which the estimator sets; use its parameter {instead}.")
    if trainer_args.get("barebones"):
        raise ParamError(
            "trainer_args has barebones=True, which turns off the callbacks, logs and checkpoints that the estimator "
            "needs; leave it out."
        )
    plugins = trainer_args.get("plugins")
    for part in plugins if isinstance(plugins, list | tuple) else [plugins]:
        if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(part).__mro__):
            raise ParamError(
                "trainer_args has the plugin AsyncCheckpointIO, which writes checkpoints in the background, but the "
                "estimator reads the file of ModelCheckpoint as soon as it is saved. Leave the plugin out."
            )
    limit = trainer_args.get("limit_train_batches")
    takes_all = limit is None or (isinstance(limit, float) and limit == 1.0)
    if not takes_all and is_elastic(typed_params(Placement, params)):
        raise ParamError(
            f"trainer_args has limit_train_batches={limit!r}. Elastic training cannot keep this number of batches per "
            "rank when the ranks change within an epoch. Use train_steps_per_epoch, which keeps the number of rows."
        )
    flavour = flavour_of(params["model"]) or default_flavour()
    known = set(inspect.signature(import_lightning(flavour).Trainer.__init__).parameters) - {"self"}
    for name in trainer_args:
        if name not in known:
            raise ParamError(f"trainer_args has {name!r}, which Lightning's Trainer does not take.")


def _try_out(
    payload: bytes, schema: DataSchema, rows: Arrays, *, synthetic: bool = False, scaled: bool = False
) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs for some rows; an empty list if only real rows can show them."""
    package = unpack(payload)
    _configure_model(package)
    _refuse_created_optimizers(package, scaled=scaled)
    sample = at_least_two_rows(rows)
    outputs = _forward(package, schema, sample, synthetic=synthetic)
    if outputs is None:
        return []
    labels = [column.name for column in schema.of("label")]
    if labels and len(outputs) != len(labels):  # a transformation_fn may have replaced the labels
        raise ModelOutputError(
            f"The model's forward returns {counted(len(outputs), 'output')} with the shapes "
            f"{[list(o.shape) for o in outputs]}, but label_cols has {len(labels)}: {labels}. transform() adds one "
            "column per label, so return one output per label."
        )
    if package.objective is not None:
        package.objective.try_out(outputs, sample, synthetic=synthetic)
    return [tuple(output.shape[1:]) for output in outputs]


def _configure_model(package: LightningPackage) -> None:
    """Let a LightningModule create its layers as Lightning does before the training."""
    configure: Callable[[], None] | None = getattr(package.model, "configure_model", None)
    if package.plain or configure is None:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            configure()
    except Exception as error:
        raise ParamError(
            f"configure_model of {type(package.model).__name__} raised {describe_error(error)} It is called without a "
            "Trainer first, to try out forward, so it must not use self.trainer."
        ) from error


def _refuse_created_optimizers(package: LightningPackage, *, scaled: bool) -> None:
    """Refuse results of ``configure_optimizers`` that cannot be trained with, if it can run without a Trainer.

    These are optimizers whose steps need a closure and, if ``scale_lr`` is set, schedulers that it cannot scale.
    """
    if package.plain:
        return
    module: Any = package.model
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            created = module.configure_optimizers()
    except Exception as error:  # noqa: BLE001  (a user's function may need a rank)
        logger.debug("configure_optimizers was not checked on the driver: %s", error)
        return
    for optimizer in _created(created, torch.optim.LBFGS):
        refuse_closure(optimizer)
    if scaled:
        refuse_unscalable(_created(created, torch.optim.lr_scheduler.LRScheduler))


def _created(result: object, kind: type[T]) -> list[T]:
    """Return all objects of a kind in a result of ``configure_optimizers``."""
    if isinstance(result, kind):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return [found for part in parts for found in _created(part, kind)]


def _forward(
    package: LightningPackage, schema: DataSchema, sample: Arrays, *, synthetic: bool
) -> list[torch.Tensor] | None:
    """Return the outputs of ``forward`` for some rows; None if only real rows can show them."""
    rows = len(next(iter(sample.values())))
    inputs = package.inputs(schema)
    tensors = [part.tensor(sample, rows) for part in inputs]
    call = called_in_order(package.model.eval(), inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = outputs_of(call(*tensors))
        except Exception as error:
            if synthetic and not isinstance(error, DataError) and not fails_by_shape(call, tensors, error):
                return None
            shown = "; ".join(f"{list(t.shape)} from {part}" for t, part in zip(tensors, inputs, strict=True))
            flavour = flavour_of(package.model)
            by_setup = flavour is not None and _overrides(package.model, flavour, "setup")
            remedy = " Layers that setup() creates are missing here; create them in configure_model()."
            raise ModelOutputError(
                f"The model's forward cannot take the feature columns: called with {shown} it raised "
                f"{describe_error(error)} transform() calls forward, so the module must define it; set "
                f"input_shapes if the columns need another shape.{remedy if by_setup else ''}"
            ) from error
    for index, output in enumerate(outputs):
        if output.dim() == 0 or len(output) != rows:
            raise ModelOutputError(
                f"Output {index} of the model has shape {list(output.shape)} for {counted(rows, 'row')}; its first "
                "dimension must be the rows."
            )
    return outputs
