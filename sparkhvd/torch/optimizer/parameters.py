"""Names and groups of an optimizer's parameters, from what the user gives."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from sparkhvd.errors import ConfigError


def chosen_groups(
    num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> int | Sequence[Sequence[torch.Tensor]]:
    """The groups that the two arguments ask for; 0 is none.

    Raises:
        ConfigError: both are given.
    """
    if num_groups:
        if groups is not None:
            raise ConfigError(f"num_groups={num_groups} and groups were both given; give groups alone.")
        warnings.warn("num_groups= is deprecated; pass groups=.", DeprecationWarning, stacklevel=3)
        return num_groups
    return 0 if groups is None else groups


def members_of(
    groups: int | Sequence[Sequence[torch.Tensor]], names: Mapping[torch.Tensor, str]
) -> list[list[torch.Tensor]]:
    """The parameters of each group.

    Args:
        groups: a number of groups of neighbours, or their members.
        names: the parameters of the optimizer, in its order.

    Raises:
        ConfigError: a member is no parameter of the optimizer, or in two groups.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"groups={groups} is negative; 0 and None send every gradient alone.")
        parameters = list(names)
        bounds = [len(parameters) * index // groups for index in range(groups + 1)] if groups else []
        return [parameters[start:end] for start, end in pairwise(bounds)]
    chosen = [list(group) for group in groups]
    times = Counter(parameter for group in chosen for parameter in group)
    if foreign := [tuple(parameter.shape) for parameter in times if parameter not in names]:
        raise ConfigError(f"groups holds tensors of shapes {foreign} that are not parameters of the optimizer.")
    if repeated := [names[parameter] for parameter, count in times.items() if count > 1]:
        raise ConfigError(f"groups holds {repeated} more than once; a gradient is in one group.")
    return chosen


def checked_passes(passes: int) -> int:
    """``passes``, which must be at least 1."""
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes} is not at least 1.")
    return passes


def names_by_position(groups: list[dict[str, Any]], only: int | None = None) -> dict[torch.Tensor, str]:
    """A name per parameter from its place in the groups, for those of group ``only`` when given."""
    return {
        parameter: f"gradient.{group}.{index}"
        for group, options in enumerate(groups)
        for index, parameter in enumerate(options["params"])
        if only is None or group == only
    }


def given_names(groups: list[dict[str, Any]], pairs: list[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """The user's name for every parameter of the optimizer.

    Raises:
        ConfigError: a parameter has no name, or a name is there twice.
    """
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(
                "named_parameters holds something that is not a (name, parameter); pass model.named_parameters()."
            )
    duplicates = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if duplicates:
        raise ConfigError(f"named_parameters holds the names {duplicates} more than once; names must be unique.")
    name_of = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"group {group}, position {index}, shape {tuple(parameter.shape)}"
        for group, options in enumerate(groups)
        for index, parameter in enumerate(options["params"])
        if parameter not in name_of
    ]
    if unnamed:
        raise ConfigError(
            f"named_parameters does not name {len(unnamed)} parameters of the optimizer ({'; '.join(unnamed)}); "
            f"its names are {sorted(name_of.values())}. Name all or pass named_parameters=None."
        )
    return {parameter: f"gradient.{name_of[parameter]}" for options in groups for parameter in options["params"]}
