"""The estimators' plug-in for PyTorch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd._util.counts import counted
from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import DataError, ModelOutputError, ParamError
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.params.policies import check_monitored, monitored_metrics
from sparkhvd.estimators.plugin import ON_CPU, Inference, Predicted, TrainSpec, typed_params
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.estimators.torch.batch_normalization import batch_dependence_of
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.checkpoint.optimizer_groups import named_groups
from sparkhvd.estimators.torch.checkpoint.safe_state import refuse_unsafe_model
from sparkhvd.estimators.torch.inputs import ModelInput, called_in_order, plan_inputs, taking_inputs_in_order
from sparkhvd.estimators.torch.losses.divisors import inexact_losses
from sparkhvd.estimators.torch.losses.objective import lazy_names, objective_of
from sparkhvd.estimators.torch.params import InputParams, TorchParams, uncompiled
from sparkhvd.estimators.torch.schedule import LRSchedule, check_schedule
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.torch.serialization.package import Package, Stepping, dumps, loads
from sparkhvd.estimators.torch.steps import MINIBATCH_ARGUMENTS, outputs_of
from sparkhvd.estimators.torch.synthetic_rows import fails_by_shape
from sparkhvd.estimators.torch.trainer import TorchTrainer
from sparkhvd.estimators.training.synthetic_rows import at_least_two_rows
from sparkhvd.estimators.training.user_errors import describe_error, is_tensor_error, pickling, with_full_stop
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.sync_batch_norm import synchronized_layers
from sparkhvd.world import World

logger = logging.getLogger(__name__)

_SYNTHETIC_ROWS = 2


class TorchPlugin:
    """Trains ``torch.nn.Module``s."""

    takes_texts = False

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.check``; runs a copy of the model in evaluation mode, without gradients.

        Raises:
            ParamError: a parameter has the wrong type, or the objects cannot be sent to the ranks.
            ModelOutputError: the model cannot take such rows, or its output does not match the labels.
        """
        _check_types(params)
        package = loads(self.pack({**params, "schema": schema}))
        check_monitored(self.monitors(params), package.objective.names())
        own_steps = package.stepping.minibatch_fn is not None
        warn_of_inexact_losses(inexact_losses(package.objective, schema, own_steps=own_steps))
        check_schedule(package.schedule, package.optimizer, scaled=bool(params.get("scale_lr")))
        are_shapes_known = all(column.shape is not None for column in schema.columns)
        if rows is None and not are_shapes_known:
            return []
        sample = at_least_two_rows(_synthetic_rows(schema) if rows is None else rows)
        return _try_out(package, schema, sample, synthetic=rows is None)

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.try_out``.

        Raises:
            ModelOutputError: the model cannot take such rows, or its output does not match the labels.
        """
        return _try_out(loads(payload), schema, at_least_two_rows(rows))

    def pack(self, params: Mapping[str, object]) -> bytes:
        """Return the model, its optimizer, the inputs and the objective in one pickle."""
        own = typed_params(TorchParams, params)
        package = Package(
            model=own.model,
            optimizer=own.optimizer,
            objective=objective_of(params),
            input_shapes=own.input_shapes,
            named_inputs=own.inputs,
            schedule=own.lr_scheduler,
            stepping=_stepping(params),
            callbacks=tuple(own.callbacks or ()),
        )
        if params.get("transformation_fn") is None:  # else the schema still has the columns before the transformation
            _inputs(params, own.schema)
        advice = "Create objects that cannot be pickled (locks, open files, sessions) inside the model's forward."
        with pickling("The model, optimizer, loss or metrics", advice=advice):
            return dumps(package)

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        """See ``FrameworkPlugin.facts``."""
        _check_types(params)
        model, optimizer = typed_params(InputParams, params).model, typed_params(TorchParams, params).optimizer
        return module_facts("PyTorch", model, optimizer)

    def monitors(self, params: Mapping[str, object]) -> Mapping[str, str]:
        """See ``FrameworkPlugin.monitors``."""
        schedule = params.get("lr_scheduler")
        monitor = schedule.monitor if isinstance(schedule, LRSchedule) else None
        return {**monitored_metrics(params), **({} if monitor is None else {"lr_scheduler": monitor})}

    def batch_dependence(self, params: Mapping[str, object]) -> BatchDependence:
        """See ``FrameworkPlugin.batch_dependence``."""
        return batch_dependence_of(params["model"])

    def packages(self) -> tuple[str, ...]:
        """See ``FrameworkPlugin.packages``."""
        return ("torch",)

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> TorchTrainer:
        """Return the trainer of one rank."""
        return TorchTrainer(loads(payload), spec, world)

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        """Write the model of ``params`` without an optimizer.

        Raises:
            ParamError: the model is not a module, the columns do not match its inputs, or it cannot be pickled.
        """
        model = uncompiled("model", params["model"])
        if not isinstance(model, torch.nn.Module):
            raise ParamError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
        inputs = _inputs(params, schema)
        with pickling("The model", "the executors"):
            artifact.save(folder, model, None, inputs)

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> TorchPredictor:
        """Return the model from a folder that ``TorchTrainer.export`` wrote, on the assigned GPU if there is one."""
        has_gpu = inference.gpu is not None and torch.cuda.is_available()
        device = torch.device(f"cuda:{inference.gpu}" if has_gpu else "cpu")
        model = artifact.load_model(folder).to(device)
        return TorchPredictor(model, artifact.load_inputs(folder), device, inference.function)

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        """Return the columns of each input and output, for the log."""
        inputs = _inputs(params, schema)
        parts = [f"input {index} is {model_input}" for index, model_input in enumerate(inputs)]
        labels = [f"output {index} is {column.name}" for index, column in enumerate(schema.of("label"))]
        return "; ".join(", ".join(group) for group in (parts, labels) if group)


@dataclass(frozen=True)
class TorchPredictor:
    """A trained model in evaluation mode."""

    model: torch.nn.Module
    inputs: tuple[ModelInput, ...]
    device: torch.device
    function: Callable[..., object] | None = None

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return called_in_order(self.model, self.inputs)

    @torch.no_grad()
    def predict(self, columns: Arrays) -> list[Predicted]:
        """Return one array per output, or one per field of an output; the first dimension is the rows."""
        rows = len(next(iter(columns.values())))
        inputs = [part.tensor(columns, rows).to(self.device) for part in self.inputs]
        if self.function is None:
            return [_array(output) for output in outputs_of(self._call(*inputs))]
        with taking_inputs_in_order(self.model, self.inputs):
            result = self.function(self.model, *inputs)
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        return [
            {name: _array(value) for name, value in output.items()} if isinstance(output, Mapping) else _array(output)
            for output in outputs
        ]


def _array(value: object) -> npt.NDArray[np.generic]:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    return plain.float().numpy() if plain.dtype == torch.bfloat16 else plain.numpy()


PLUGIN = TorchPlugin()


def _inputs(params: Mapping[str, object], schema: DataSchema) -> tuple[ModelInput, ...]:
    own = typed_params(InputParams, params)
    return plan_inputs(own.model, schema.of("feature"), own.input_shapes, own.inputs)


def module_facts(framework: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> ModelFacts:
    """Return the facts of a module and its optimizer, if the driver has one; lazy parameters have no shapes yet."""
    lazy, parameters = torch.nn.parameter.is_lazy, dict(model.named_parameters())
    return ModelFacts(
        framework,
        "" if optimizer is None else type(optimizer).__name__,
        {name: None if lazy(parameter) else tuple(parameter.shape) for name, parameter in parameters.items()},
        () if optimizer is None else tuple(map(tuple, named_groups(optimizer, model))),
        dtypes={name: str(parameter.dtype).removeprefix("torch.") for name, parameter in parameters.items()},
    )


def _check_types(params: Mapping[str, object]) -> None:
    model = params["model"]
    if not isinstance(model, torch.nn.Module):
        hint = estimator_hint(model, ("torch",))
        raise ParamError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.{hint}")
    refuse_exported(model)
    refuse_unsupported_parameters(model)
    check_optimizer(params["optimizer"], model)
    for callback in typed_params(TorchParams, params).callbacks or ():
        if not isinstance(callback, TorchCallback):
            raise ParamError(
                f"callbacks holds a {type(callback).__name__}; TorchEstimator's callbacks are TorchCallback objects."
            )
    refuse_unsafe_model(model)


def refuse_exported(model: torch.nn.Module) -> None:
    """Refuse modules of ``torch.export``, which can be neither pickled nor switched to evaluation mode.

    Raises:
        ParamError: the model is or contains such a module; the message names it.
    """
    for name, module in model.named_modules():
        if getattr(vars(module).get("eval"), "__module__", "") == "torch.export.exported_program":
            raise ParamError(
                f"{f'The model contains {name!r}, which' if name else 'The model'} comes from ExportedProgram.module() "
                "of torch.export; such a module can be neither pickled nor switched to evaluation mode. Pass the "
                "module that was exported, or one made by torch.jit.script or torch.fx.symbolic_trace."
            )


def refuse_unsupported_parameters(model: torch.nn.Module, *, may_be_lazy: bool = False) -> None:
    """Refuse parameters that ranks cannot train together: lazy, complex, or different parameters in the same memory.

    Args:
        model: the model.
        may_be_lazy: whether the ranks create the values of lazy parameters before they exchange any.

    Raises:
        ParamError: the model has such parameters; the message names them.
    """
    if not may_be_lazy:
        _refuse_lazy_parameters(model)
    complex_names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if complex_names:
        raise ParamError(
            f"The model's parameters {complex_names} are complex, and ranks exchange only real numbers. Store each as "
            "torch.view_as_real(parameter), and call torch.view_as_complex in forward."
        )
    _refuse_shared_memory(model)


def _refuse_lazy_parameters(model: torch.nn.Module) -> None:
    """Refuse a model with lazy parameters or buffers, because each rank would initialize them with different values."""
    if lazy := lazy_names(model):
        raise ParamError(
            f"The model's parameters {lazy} have no shape and no values yet. Call the model on a few rows, such as "
            "model(torch.zeros(2, 3)), before you create the estimator."
        )


def _refuse_shared_memory(model: torch.nn.Module) -> None:
    """Refuse parameters that share their memory, because their copies on a GPU would not."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return  # TorchScript returns a new object for every name of a parameter
    names: dict[tuple[int, int], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided or parameter.is_meta or torch.nn.parameter.is_lazy(parameter):
            continue
        other = names.setdefault((parameter.data_ptr(), parameter.numel()), name)
        if other != name and parameter.numel():
            raise ParamError(
                f"The model's parameters {other!r} and {name!r} are different objects that share their memory, which "
                "they would not do on a GPU. Use one parameter for both (b.weight = a.weight instead of "
                "b.weight.data = a.weight.data), and create the optimizer after that."
            )


def warn_of_inexact_losses(inexact: Sequence[str]) -> None:
    """Warn of losses for which N ranks only approximate one big batch."""
    for name in inexact:
        logger.warning(
            "%s divides by the class weights or by the number of labels that are not ignored, but each rank's loss is "
            "weighted by its rows: training on N ranks only approximates one big batch. Use sample_weight_col for an "
            "exact result.",
            name,
        )


def check_optimizer(optimizer: object, model: torch.nn.Module) -> None:
    """Check that an optimizer can train this model.

    Raises:
        ParamError: it is not an optimizer, computes the loss several times per step, or belongs to another model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ParamError(
            f"optimizer is a {type(optimizer).__name__}; pass an instance such as torch.optim.Adam(model.parameters())."
            f"{estimator_hint(optimizer, ('torch',))}"
        )
    refuse_closure(optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ParamError(
            f"optimizer holds {counted(len(foreign), 'parameter')} that the model does not have (the first has shape "
            f"{list(foreign[0].shape)}); create it from model.parameters() of the model that you pass, or take both "
            "from getModelAndOptimizer() of a trained model."
        )


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose steps need a closure.

    Raises:
        ParamError: the optimizer computes the loss several times per step.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ParamError(
            f"{type(optimizer).__name__} decides from the loss of its own rank how many evaluations a step takes, so "
            "the ranks would diverge. Use another optimizer."
        )


def _stepping(params: Mapping[str, Any]) -> Stepping:
    compiled = params.get("torch_compile")
    _check_clipping(params)
    stepping = Stepping(
        clip_norm=params.get("clip_grad_norm"),
        clip_value=params.get("clip_grad_value"),
        mixed_precision=params.get("mixed_precision"),
        compile=compiled if isinstance(compiled, dict) else ({} if compiled else None),
        compression=compressor(params.get("gradient_compression")) or Compression.none,
        minibatch_fn=params.get("train_minibatch_fn"),
    )
    if stepping.minibatch_fn is not None:
        _check_signature(stepping.minibatch_fn)
        for name in ("clip_grad_norm", "clip_grad_value"):
            if params.get(name) is not None:
                raise ParamError(
                    f"{name} has no effect with train_minibatch_fn, which takes the optimizer steps itself; clip "
                    f"inside the function and leave {name} out."
                )
        if stepping.mixed_precision == "fp16":
            raise ParamError("train_minibatch_fn cannot scale losses for mixed_precision='fp16'; use 'bf16'.")
        if synchronized_layers(typed_params(InputParams, params).model):
            raise ParamError(
                "train_minibatch_fn cannot be combined with SyncBatchNorm: the function does not run on a rank without "
                "rows, and SyncBatchNorm would wait for that rank. Use only one of the two."
            )
    return stepping


def _check_clipping(params: Mapping[str, Any]) -> None:
    """Refuse to clip sparse gradients, for which PyTorch has no norm."""
    sparse = [
        name or "the model"
        for name, layer in params["model"].named_modules()
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad
    ]
    for name in ("clip_grad_norm", "clip_grad_value"):
        if sparse and params.get(name) is not None:
            raise ParamError(
                f"{name} cannot clip the sparse gradients of embeddings ({', '.join(sparse)}). Create them with "
                f"sparse=False, or leave {name} out."
            )


def compressor(compression: Any) -> Any:
    """Return the compression of gradients; a name stands for an attribute of ``hvd.Compression``."""
    return getattr(Compression, compression) if isinstance(compression, str) else compression


def _check_signature(minibatch_fn: Callable[..., object]) -> None:
    try:
        inspect.signature(minibatch_fn).bind(*MINIBATCH_ARGUMENTS)
    except ValueError:  # a built-in function without a signature
        return
    except TypeError as error:
        raise ParamError(
            f"train_minibatch_fn cannot be called with ({', '.join(MINIBATCH_ARGUMENTS)}): {error}. It must "
            "take all of these arguments, in this order."
        ) from error


def _synthetic_rows(schema: DataSchema) -> Arrays:
    return {column.name: columns.blank(column, _SYNTHETIC_ROWS) for column in schema.columns}


def _try_out(package: Package, schema: DataSchema, sample: Arrays, *, synthetic: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs for some rows; an empty list if only real rows can show them."""
    rows = len(next(iter(sample.values())))
    model = package.model.eval()
    planned = plan_inputs(package.model, schema.of("feature"), package.input_shapes, package.named_inputs)
    call, inputs = called_in_order(model, planned), [part.tensor(sample, rows) for part in planned]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            result = call(*inputs)
        except Exception as error:
            if synthetic and not fails_by_shape(call, inputs, error):
                logger.debug("The model does not take synthetic rows: %s", error)
                return []
            raise ModelOutputError(_describe_input_failure(planned, schema, inputs, error)) from error
        try:
            outputs = outputs_of(result)
        except DataError as error:
            raise ModelOutputError(str(error)) from error
        for index, output in enumerate(outputs):
            if output.dim() == 0 or len(output) != rows:
                raise ModelOutputError(
                    f"Output {index} of the model has shape {list(output.shape)} for {counted(rows, 'row')}; its first "
                    "dimension must be the rows."
                )
        package.objective.try_out(outputs, sample, synthetic=synthetic)
        _try_training_mode(package, call, inputs)
    return [tuple(output.shape[1:]) for output in outputs]


def _try_training_mode(package: Package, call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
    """Check the outputs in training mode, too, if the model can run in that mode on the driver."""
    if package.stepping.minibatch_fn is not None or synchronized_layers(package.model):
        return  # a synchronized layer would wait for other ranks, and there are none
    package.model.train()
    try:
        outputs = outputs_of(call(*inputs))
    except Exception as error:  # noqa: BLE001  (collectives fail on the driver, and some models need more rows)
        logger.debug("The model was not checked in training mode: %s", error)
    else:
        package.objective.check_training(outputs)


def _describe_input_failure(
    planned: Sequence[ModelInput], schema: DataSchema, inputs: Sequence[torch.Tensor], error: Exception
) -> str:
    described_inputs = "; ".join(
        f"input {index} of shape {list(tensor.shape)} from {part}"
        for index, (part, tensor) in enumerate(zip(planned, inputs, strict=True))
    )
    columns = ", ".join(f"{c.name}: {c.dtype}{list(c.shape or ())}" for c in schema.of("feature"))
    if not is_tensor_error(error):
        return f"The model raised {describe_error(error)} It was called with {described_inputs}."
    return (
        f"The model cannot take the feature columns ({columns}). It was called with {described_inputs}, and raised "
        f"{type(error).__name__}: {with_full_stop(error)} Set input_shapes if the columns need another shape; integer "
        "columns stay integers only for a model with an embedding layer."
    )
