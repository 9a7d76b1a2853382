"""Names and groups of an optimizer's parameters, from the user's arguments."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sparkhvd._util.counts import counted
from sparkhvd.errors import ConfigError


def select_groups(
    num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> int | Sequence[Sequence[torch.Tensor]]:
    """Return the groups that the two arguments select; 0 means no groups.

    Raises:
        ConfigError: both arguments are set.
    """
    if num_groups:
        if groups is not None:
            raise ConfigError(f"num_groups={num_groups} and groups are both set; pass groups only.")
        warnings.warn("num_groups= is deprecated; pass groups=.", DeprecationWarning, stacklevel=3)
        return num_groups
    return 0 if groups is None else groups


def members_of(
    groups: int | Sequence[Sequence[torch.Tensor]], names: Mapping[torch.Tensor, str]
) -> list[list[torch.Tensor]]:
    """Return the parameters of each group.

    Args:
        groups: a number of groups of neighboring parameters, or the members of each group.
        names: the parameters of the optimizer, in its order.

    Raises:
        ConfigError: a member is not a parameter of the optimizer, or is in two groups.
    """
    if isinstance(groups, int | np.integer):
        if groups < 0:
            raise ConfigError(f"groups must be at least 0, got {groups}; 0 and None send every gradient alone.")
        parameters = list(names)
        bounds = [len(parameters) * index // groups for index in range(groups + 1)] if groups else []
        return [parameters[start:end] for start, end in pairwise(bounds)]
    members = [list(group) for group in groups]
    counts = Counter(parameter for group in members for parameter in group)
    if foreign := [tuple(parameter.shape) for parameter in counts if parameter not in names]:
        raise ConfigError(f"groups contains tensors of shapes {foreign} that are not parameters of the optimizer.")
    if repeated := [names[parameter] for parameter, count in counts.items() if count > 1]:
        raise ConfigError(f"groups contains {repeated} more than once; list every parameter in one group only.")
    return members


def checked_passes(passes: int) -> int:
    """Return ``passes``, or raise ``ConfigError`` if it is less than 1."""
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be at least 1, got {passes}.")
    return passes


def names_by_position(groups: list[dict[str, Any]], only: int | None = None) -> dict[torch.Tensor, str]:
    """Return a name per parameter from its position in the groups; ``only`` limits the result to one group."""
    return {
        parameter: f"gradient.{group}.{index}"
        for group, options in enumerate(groups)
        for index, parameter in enumerate(options["params"])
        if only is None or group == only
    }


def named_by_user(groups: list[dict[str, Any]], pairs: list[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """Return the user's name for every parameter of the optimizer.

    Raises:
        ConfigError: a parameter has no name, or two parameters have the same name.
    """
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(
                "named_parameters has an entry that is not a (name, parameter) pair; pass model.named_parameters()."
            )
    duplicates = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if duplicates:
        raise ConfigError(f"named_parameters contains the names {duplicates} more than once; names must be unique.")
    name_of = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"group {group}, position {index}, shape {tuple(parameter.shape)}"
        for group, options in enumerate(groups)
        for index, parameter in enumerate(options["params"])
        if parameter not in name_of
    ]
    if unnamed:
        raise ConfigError(
            f"named_parameters does not name {counted(len(unnamed), 'parameter')} of the optimizer "
            f"({'; '.join(unnamed)}); its names are {sorted(name_of.values())}. Name all of them, or pass "
            "named_parameters=None."
        )
    return {parameter: f"gradient.{name_of[parameter]}" for options in groups for parameter in options["params"]}
