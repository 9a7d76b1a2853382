"""Elastic training for PyTorch: ``hvd.elastic.run``, ``hvd.elastic.TorchState``, ``hvd.elastic.ElasticSampler``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from sparkhvd._util.counts import counted
from sparkhvd.comm import objects, session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.errors import ConfigError, HorovodInternalError, HostsUpdatedInterrupt
from sparkhvd.torch.buffers import take_new_buffers
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer
from sparkhvd.torch.states import broadcast_optimizer_state, broadcast_parameters, load_optimizer_state

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]

_IMMUTABLE = frozenset({bool, int, float, str, type(None)})


class _Part(Protocol):
    """A part of a state that has a state of its own; ``saved`` is the copy of the last commit."""

    saved: Any

    def collect(self, pairs: _Pairs) -> Any:
        """Return the next copy, in which the tensors of ``pairs`` are still to be copied."""

    def restore(self) -> None: ...

    def sync(self) -> None: ...

    def reset(self) -> None: ...

    def describe(self, name: str) -> list[str]: ...


class TorchState(ObjectState):
    """The state of an elastic PyTorch training.

    It holds the ``state_dict`` of every model and optimizer, but not their other attributes, such as counters. Pass
    such attributes as plain values. Parameter groups that an optimizer got after the last commit are removed by
    ``restore``, so the function can add them again. Gradients are not part of a commit: ``restore`` and ``reset`` set
    them to None. If gradients accumulate over several backward passes, commit after a step.

    Args:
        model: the model; None if there is none.
        optimizer: the optimizer, usually a ``DistributedOptimizer``; None if there is none.
        **kwargs: further models and optimizers, ``ElasticSampler``, other objects with ``state_dict`` and
            ``load_state_dict`` (such as learning rate schedulers), and plain values. All become attributes, which can
            be set to other objects on all ranks.

    Examples:
        >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        named = {"model": model, "optimizer": optimizer}
        everything = {name: value for name, value in named.items() if value is not None} | kwargs
        self._parts: dict[str, _Part] = {}
        for name, value in everything.items():
            part = _part_of(value)
            if part is not None:
                self._require_free(name)
                setattr(self, name, value)
                self._parts[name] = part
        super().__init__(**{name: value for name, value in everything.items() if name not in self._parts})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A model, an optimizer or another part can be replaced; it is saved at once."""
        if name in vars(self).get("_parts", ()) and value is not getattr(self, name):
            part = _part_of(value)
            if part is None:
                raise ConfigError(
                    f"The state's {name!r} cannot be replaced by {value!r}, which has no state_dict. Set an object of "
                    f"the same kind, as in state.{name} = {type(getattr(self, name)).__name__}(...)."
                )
            _save([part])
            self._parts[name] = part
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of all parts in memory. If user code raises an error, the previous copy stays whole."""
        _save(self._parts.values(), before_copy=super().save)

    def restore(self) -> None:
        """Return to the last commit or ``sync``."""
        for part in self._parts.values():
            part.restore()
        super().restore()

    def _describe_parts(self) -> list[str]:
        return [
            *(line for name, part in self._parts.items() for line in part.describe(name)),
            *super()._describe_parts(),
        ]

    def _broadcast(self) -> None:
        for part in self._parts.values():
            part.sync()
        super()._broadcast()

    def _saved_copy(self) -> dict[str, Any]:
        return {"parts": {name: part.saved for name, part in self._parts.items()}, **super()._saved_copy()}

    def _set_saved_copy(self, saved: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.saved = saved["parts"][name]
        super()._set_saved_copy(saved)

    def reset(self) -> None:
        """Adapt samplers to the new ranks, and drop gradients and their unfinished exchanges."""
        for part in self._parts.values():
            part.reset()


class _ModelPart:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.saved: dict[str, Any] = {}
        self._sources: list[torch.Tensor] = []  # by key, what was copied to ``saved``; empty if it was not all memory
        self._dtypes: list[torch.dtype] = []  # of the model

    def collect(self, pairs: _Pairs) -> Any:
        if self._sources and self._is_unmoved(self._model.state_dict(keep_vars=True)):
            # The usual case takes no work in Python for each tensor: that took up to 3 % of the time of the copies.
            pairs.targets += self.saved.values()
            pairs.sources += self._sources
            return self.saved
        state, known = self._model.state_dict(), len(pairs.sources)
        collected = _collected(state, self.saved, pairs)
        sources = pairs.sources[known:]
        memory = {tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())}
        # Other sources are computed in each commit, so they must not be kept.
        is_memory = len(sources) == len(state) and all(tensor.data_ptr() in memory for tensor in sources)
        self._sources = sources if is_memory else []
        self._dtypes = [tensor.dtype for tensor in self._sources]
        return collected

    def _is_unmoved(self, state: dict[str, Any]) -> bool:
        """Return whether all entries are the tensors of the last commit: the same memory, with the same form."""
        tensors = state.values()
        return (
            list(state) == list(self.saved)
            and set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
            and all(map(torch.Tensor.is_set_to, tensors, self._sources))
            and [tensor.dtype for tensor in tensors] == self._dtypes
        )

    def restore(self) -> None:
        self._load(copy.deepcopy(self.saved))  # a module may keep what it loads

    def _load(self, state: dict[str, Any]) -> None:
        take_new_buffers(self._model, state)
        self._model.load_state_dict(state)

    def sync(self) -> None:
        state = self._model.state_dict()
        broadcast_parameters({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
        others = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        if others:  # from get_extra_state()
            state.update(objects.broadcast_object(session.current(), others, name="elastic.extra_state"))
        self._load(state)  # a state_dict may hold copies of what the model uses

    def reset(self) -> None:
        return

    def describe(self, name: str) -> list[str]:
        tensors = {key: value for key, value in self._model.state_dict().items() if isinstance(value, torch.Tensor)}
        return [
            _kind(self._model, name),
            *(f"the tensor {key!r} of {name!r} ({_dtype_and_shape(value)})" for key, value in tensors.items()),
        ]


class _OptimizerPart:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.saved: dict[str, Any] = {}

    def collect(self, pairs: _Pairs) -> Any:
        return _collected(self._optimizer.state_dict(), self.saved, pairs)

    def restore(self) -> None:
        committed, groups = len(self.saved["param_groups"]), self._optimizer.param_groups
        if len(groups) < committed:
            raise ConfigError(
                f"The commit has an optimizer with {counted(committed, 'parameter group')}, but this rank's has "
                f"{len(groups)}. Call add_param_group() for the missing groups before the state is restored."
            )
        self._forget_gradients()
        if isinstance(self._optimizer, ExchangingOptimizer):
            self._optimizer.drop_param_groups(committed)
        else:
            del groups[committed:]
        load_optimizer_state(self._optimizer, copy.deepcopy(self.saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self._optimizer)

    def reset(self) -> None:
        self._forget_gradients()
        if isinstance(self._optimizer, ExchangingOptimizer):
            self._optimizer.abandon_step()

    def _forget_gradients(self) -> None:
        """Set the gradients to None: new ranks have none, and a backward pass adds to the interrupted step's."""
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            parameter.grad = None

    def describe(self, name: str) -> list[str]:
        return [_kind(self._optimizer, name)]


class _StatefulPart:
    """Any object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.saved: Any = None

    def collect(self, pairs: _Pairs) -> Any:  # noqa: ARG002  (it is small)
        return copy.deepcopy(self._value.state_dict())

    def restore(self) -> None:
        self._value.load_state_dict(copy.deepcopy(self.saved))
        self._forget_unscaling()

    def sync(self) -> None:
        state = objects.broadcast_object(session.current(), self._value.state_dict(), name="elastic.state_dict")
        self._value.load_state_dict(state)

    def reset(self) -> None:
        self._forget_unscaling()
        if isinstance(self._value, ElasticSampler):
            self._value.reset()

    def _forget_unscaling(self) -> None:
        """Let a scaler forget that it has unscaled gradients; PyTorch has no public way."""
        if isinstance(self._value, torch.amp.GradScaler):
            self._value._per_optimizer_states.clear()  # noqa: SLF001

    def describe(self, name: str) -> list[str]:
        return [_kind(self._value, name)]


def _part_of(value: Any) -> _Part | None:
    """Return the part for a value; None for a plain value."""
    if isinstance(value, torch.nn.Module):
        return _ModelPart(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerPart(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _StatefulPart(value)
    return None


def _save(parts: Iterable[_Part], before_copy: Callable[[], None] = lambda: None) -> None:
    """Make the next copy of all parts. Nothing changes until all of them are known."""
    parts = list(parts)
    with torch.no_grad():
        pairs = _Pairs()
        copies = [part.collect(pairs) for part in parts]
        before_copy()
        pairs.copy()
    for part, saved in zip(parts, copies, strict=True):
        part.saved = saved


def _kind(value: object, name: str) -> str:
    return f"the {type(value).__name__} {name!r}"


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    shape = "" if torch.nn.parameter.is_lazy(tensor) else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


def copied(value: Any, earlier: Any) -> Any:
    """Return a copy of a state. Tensors reuse the memory of ``earlier``, the previous copy, if they are alike.

    Until all parts of the state are known, the previous copy stays as it is: an error leaves it whole.
    """
    pairs = _Pairs()
    copy_of_value = _collected(value, earlier, pairs)
    pairs.copy()
    return copy_of_value


class _Pairs:
    """Tensors of the previous copies, each with the tensor to copy into it."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        # By the address of each target, the address of its source. Two tensors that shared their memory had one copy in
        # common; they need a copy each once they no longer share it.
        self._addresses: dict[int, int] = {}

    def add(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Add a pair; return False if another source is to be copied to the target."""
        if self._addresses.setdefault(target.data_ptr(), source.data_ptr()) != source.data_ptr():
            return False
        self.targets.append(target)
        self.sources.append(source)
        return True

    def copy(self) -> None:
        """Copy all tensors."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


def _collected(value: Any, earlier: Any, pairs: _Pairs) -> Any:
    """Return a copy of ``value``; its tensors in ``pairs`` still have the content of ``earlier``, the previous copy."""
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, dict) and type(value) is type(earlier) and value.keys() == earlier.keys():
        copy_of_value = copy.copy(value)  # with its attributes, such as the versions in the state of a module
        for key, entry in value.items():
            copy_of_value[key] = _collected(entry, earlier[key], pairs)
        return copy_of_value
    if type(value) is type(earlier) is list and len(value) == len(earlier):
        return [_collected(entry, known, pairs) for entry, known in zip(value, earlier, strict=True)]
    if _is_alike(value, earlier) and pairs.add(earlier, value):
        return earlier
    return copy.deepcopy(value)


def _is_alike(value: Any, other: Any) -> bool:
    """Return whether both are plain tensors of equal shape, type and layout, with one location for each element."""
    return (
        type(value) is type(other) is torch.Tensor
        and value.shape == other.shape
        and value.dtype is other.dtype
        and value.layout is other.layout is torch.strided
        and value.stride() == other.stride()
        and value.device == other.device
        and (value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last))
    )
