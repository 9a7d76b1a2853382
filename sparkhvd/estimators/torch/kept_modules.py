"""Modules that callbacks keep beside the model, such as moving averages of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from sparkhvd.comm import objects, session


def kept_modules(callbacks: Sequence[object], own: Iterable[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules that callbacks keep, by names that are the same on all ranks.

    Args:
        callbacks: the callbacks.
        own: the modules that are trained; a callback may refer to them and to their parts.
    """
    own_ids = {id(module) for part in own for module in part.modules()}
    return {
        f"{index} {name}".replace(".", " "): module
        for index, callback in enumerate(callbacks)
        for name, module in _modules_in(vars(callback))
        if id(module) not in own_ids
    }


def common_modules(kept: Mapping[str, torch.nn.Module]) -> torch.nn.ModuleDict:
    """Return the kept modules that all ranks have: a callback may keep a module on one rank only; collective."""
    names = objects.allgather_object(session.current(), sorted(kept), name="modules of callbacks")
    common = set(names[0]).intersection(*names)
    return torch.nn.ModuleDict({name: kept[name] for name in sorted(common)})


def of_existing_modules(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of buffers whose module exists: a callback may drop a module, or not create it again."""
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    return {key: value for key, value in values.items() if key.rpartition(".")[0] in paths}


def _modules_in(values: Mapping[str, object]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules among some values, and those in lists and dicts among the values, with their names."""
    for name, value in values.items():
        parts: Iterable[tuple[object, object]] = ()
        if isinstance(value, torch.nn.Module):
            yield name, value
        elif isinstance(value, Mapping):
            parts = value.items()
        elif isinstance(value, list | tuple):
            parts = enumerate(value)
        yield from ((f"{name} {key}", part) for key, part in parts if isinstance(part, torch.nn.Module))
