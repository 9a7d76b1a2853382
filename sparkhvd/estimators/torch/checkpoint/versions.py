"""Whether a rank still has the whole state of its last complete step, for the commits of an elastic fit."""

from __future__ import annotations

import torch


def versions(modules: torch.nn.Module) -> tuple[list[int], list[torch.Tensor]]:
    """Return a value that differs if an update or a forward pass has changed parameters since.

    A change through ``Tensor.data`` has no version. The sums of the parameters show such changes of whole tensors; a
    GPU computes them until they are compared.
    """
    values = [parameter.detach() for parameter in modules.parameters()]
    # In half precision, most sums would be infinite or too coarse.
    is_half = [value.is_floating_point() and value.element_size() < 4 for value in values]
    sums = [(value.float() if half else value).sum() for value, half in zip(values, is_half, strict=True)]
    return [value._version for value in values], sums  # noqa: SLF001  (PyTorch documents it)


def has_only_parameters(module: torch.nn.Module) -> bool:
    """Return whether a module has neither buffers nor extra states nor torchmetrics.

    These may change in every forward pass, and lost ranks have a part of them.
    """
    saved = module.state_dict(keep_vars=True).values()
    has_metrics = any(
        base.__module__.startswith("torchmetrics.") for part in module.modules() for base in type(part).__mro__
    )
    is_plain = all(isinstance(part, torch.nn.Parameter) for part in saved)
    return is_plain and next(module.buffers(), None) is None and not has_metrics
