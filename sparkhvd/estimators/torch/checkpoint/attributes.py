"""Attributes as training state: modules and optimizers have changing attributes that ``state_dict`` omits."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkhvd.comm import objects, session
from sparkhvd.estimators.torch.checkpoint.safe_state import plain_numbers

logger = logging.getLogger(__name__)

Owner = nn.Module | torch.optim.Optimizer
State = dict[str, Any]
_Key = tuple[str, str]  # the path of a module or optimizer, and the name of its attribute

# The attributes that PyTorch sets in every module.
_MODULE_ATTRIBUTES: frozenset[str] = frozenset(vars(nn.Module()))
# Hooks of pruning, weight and spectral normalization compute an attribute from a parameter with such a suffix.
_SOURCE_SUFFIXES = ("_orig", "_g", "_v")
_MAX_LISTED_NAMES = 10  # attributes in a warning
# The numbers of values and bytes of an attribute in which changes are detected.
_MAX_VALUES, _MAX_BYTES = 10_000, 2**20


class ChangedAttributes:
    """The attributes that training changes, such as counters.

    Numbers, tensors, and lists and dicts of them become part of a checkpoint, if all ranks have the same value. Classes
    with their own ``get_extra_state`` or ``state_dict`` choose their saved state themselves.

    Args:
        owners: the modules and optimizers by name; the submodules of a module belong to it.
        framework_attributes: more attributes that a framework sets in modules; their changes are ignored.
    """

    def __init__(self, owners: Mapping[str, Owner], framework_attributes: Collection[str] = ()) -> None:
        self.owners = dict(owners)
        self._ignored_attributes = _MODULE_ATTRIBUTES.union(framework_attributes)
        self._alive: list[object] = []  # objects whose ids are in the signatures
        self._start: dict[_Key, object] = {}
        self._resumed: dict[_Key, Any] = {}
        self._state: State = {"values": {}, "on_gpu": [], "missing": []}

    def begin(self) -> None:
        """Detect changes from now on. Earlier changes come from hooks that a resumed run calls, too."""
        self._alive.clear()
        self._start = self._signatures(self._alive)
        self.apply()

    def have_changed(self) -> bool:
        """Return whether this rank has changed attributes in this run, including the part before an interruption."""
        return bool(self._resumed) or self._signatures([]) != self._start

    def agree(self) -> None:
        """Find the changed attributes for ``state()``; collective."""
        changed = {
            key for key, now in self._signatures([]).items() if key in self._resumed or now != self._start.get(key)
        }
        registered_ids = self._registered_ids()
        values = {key: value for key, _, value in self._attributes() if key in changed}
        kept = {key: _copy(value) for key, value in values.items() if _is_plain(value, registered_ids)}
        own = {key: _digest(kept[key]) if key in kept else "" for key in changed}
        all_digests = objects.allgather_object(session.current(), own, name="changed attributes")
        same = {key for key in kept if all(other.get(key) == own[key] for other in all_digests)}
        missing = {".".join(key) for other in all_digests for key in other if key not in same}
        self._state = {
            "values": {key: value for key, value in kept.items() if key in same},
            "on_gpu": [key for key in kept if key in same and _is_on_gpu(values[key])],
            "missing": sorted(missing),
        }

    def state(self) -> State:
        """Return the result of the last ``agree()``, for ``restore``."""
        return self._state

    def restore(self, state: State) -> None:
        """Set the attributes that a checkpoint holds."""
        self._state = state or self._state
        self._resumed = self._state["values"]
        self.apply()

    def apply(self) -> None:
        """Set the attributes of the checkpoint again, after hooks that the earlier run called before it."""
        owners = dict(self._parts())
        for key, value in self._resumed.items():
            owner, name = owners.get(key[0]), key[1]
            if owner is not None and not _is_registered(owner, name):
                device = self._device() if key in self._state["on_gpu"] else torch.device("cpu")
                vars(owner)[name] = _overwritten(vars(owner).get(name), value, device)

    def warn_of_missing(self) -> None:
        """Warn of attributes that the training had changed before the checkpoint, which does not hold them."""
        if self._state["missing"]:
            logger.warning(
                "The training had changed these attributes, but its checkpoint does not hold them: %s. The resumed run "
                "begins with their original values. A checkpoint holds only numbers and tensors that are the same on "
                "all ranks. For others, use a buffer or get_extra_state of a module, or the state of an optimizer.",
                _listed(self._state["missing"]),
            )

    def _modules(self) -> list[nn.Module]:
        return [owner for owner in self.owners.values() if isinstance(owner, nn.Module)]

    def _device(self) -> torch.device:
        return next(
            (tensor.device for module in self._modules() for tensor in module.parameters()), torch.device("cpu")
        )

    def _registered_ids(self) -> set[int]:
        """Return the ids of all parameters and buffers."""
        return {id(tensor) for module in self._modules() for tensor in (*module.parameters(), *module.buffers())}

    def _parts(self) -> Iterator[tuple[str, Owner]]:
        """Yield the modules and optimizers whose attributes are saved here."""
        for name, owner in self.owners.items():
            if isinstance(owner, nn.Module):
                yield from ((path, part) for path, part in owner.named_modules(prefix=name) if _is_saved_here(part))
            elif type(owner).state_dict is torch.optim.Optimizer.state_dict:
                yield name, owner

    def _attributes(self) -> Iterator[tuple[_Key, Owner, Any]]:
        for path, owner in self._parts():
            ignored = self._ignored_attributes if isinstance(owner, nn.Module) else _optimizer_attributes()
            for name, value in vars(owner).items():
                if name not in ignored and not _is_derived(owner, name, value):
                    yield (path, name), owner, value

    def _signatures(self, alive: list[object]) -> dict[_Key, object]:
        registered_ids, shared = self._registered_ids(), set[int]()
        return {key: _signature(value, registered_ids, alive, shared) for key, _, value in self._attributes()}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more


def _is_saved_here(part: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule) or type(part).get_extra_state is not nn.Module.get_extra_state:
        return False
    return not any(base.__module__.startswith("torchmetrics.") for base in type(part).__mro__)


def _is_registered(owner: Owner, name: str) -> bool:
    if not isinstance(owner, nn.Module):
        return False
    return any(name in vars(owner)[registry] for registry in ("_parameters", "_buffers", "_modules"))


@cache
def _optimizer_attributes() -> frozenset[str]:
    """Return the attributes that PyTorch sets in optimizers; the first optimizer imports torch._dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"step", "_opt_called", "_step_count"}


def _is_derived(owner: Owner, name: str, value: object) -> bool:
    """Return whether the next forward pass computes the attribute again."""
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        return True
    return isinstance(owner, nn.Module) and any(f"{name}{end}" in owner._parameters for end in _SOURCE_SUFFIXES)  # noqa: SLF001


def _signature(
    value: Any, registered_ids: Collection[int], alive: list[object], shared: set[int]
) -> tuple[object, ...]:
    """Return a signature that differs if the value changes, without copying its tensors.

    Args:
        value: the value.
        registered_ids: ids of parameters and buffers.
        alive: receives the objects whose ids are in the signature.
        shared: ids of the objects of other classes that earlier signatures contain. Later signatures omit them, so that
            an object that many modules refer to, such as a configuration, is read once.
    """
    tokens: list[object] = []
    queue, seen = deque([value]), set(shared)
    while queue and len(tokens) < _MAX_VALUES:
        part = queue.popleft()
        if part is None or isinstance(part, bool | int | float | complex | str | bytes | np.generic):
            tokens.append((type(part).__name__, repr(part)))
        elif id(part) not in seen:
            seen.add(id(part))
            alive.append(part)
            token, inner = _token(part, registered_ids)
            tokens.append((id(part), token))
            queue.extend(inner)
            if token is None:
                shared.add(id(part))
    return tuple(tokens)


def _token(value: Any, registered_ids: Collection[int]) -> tuple[object, Iterable[object]]:
    """Return a token that differs if the object itself changes, and the values in the object."""
    if isinstance(value, torch.Tensor):
        is_counted = (
            id(value) not in registered_ids and not isinstance(value, nn.Parameter) and not value.is_inference()
        )
        return value._version if is_counted else 0, ()  # noqa: SLF001  (torch counts the changes of a tensor)
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).digest() if value.nbytes <= _MAX_BYTES else b"", ()
    if isinstance(value, Mapping):
        return len(value), chain.from_iterable(value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return len(value), value
    return None, () if callable(value) else (getattr(value, "__dict__", None),)


def _is_plain(value: Any, registered_ids: Collection[int]) -> bool:
    """Return whether a checkpoint can hold the value; a parameter or buffer within a list must stay the same object."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
        return plain and not value.requires_grad and not value.is_meta and id(value) not in registered_ids
    if type(value) is dict:
        return all(type(key) in {int, str} and _is_plain(part, registered_ids) for key, part in value.items())
    if type(value) in {list, tuple}:
        return all(_is_plain(part, registered_ids) for part in value)
    return value is None or type(value) in {bool, int, float} or isinstance(value, np.bool_ | np.integer | np.floating)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(part) for part in value)
    return plain_numbers(value)


def _digest(value: Any) -> str:
    """Return a text that is equal for equal values; ``value`` is a result of ``_copy``."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, dict):
        return str({key: _digest(part) for key, part in value.items()})
    return str([_digest(part) for part in value]) if isinstance(value, list | tuple) else repr(value)


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_is_on_gpu(part) for part in parts)


def _overwritten(current: Any, value: Any, device: torch.device) -> Any:
    """Return a copy of ``value``, in the memory of ``current`` if the form is the same: others may refer to it."""
    if isinstance(value, torch.Tensor):
        if isinstance(current, torch.Tensor) and (current.shape, current.dtype) == (value.shape, value.dtype):
            return value.to(current.device).clone() if 0 in current.stride() else current.copy_(value)
        return value.to(device, copy=True)
    if isinstance(value, dict):
        parts = current if isinstance(current, dict) else {}
        return {key: _overwritten(parts.get(key), part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        known = current if isinstance(current, list | tuple) and len(current) == len(value) else [None] * len(value)
        return type(value)(
            _overwritten(current_part, part, device) for current_part, part in zip(known, value, strict=True)
        )
    return value
