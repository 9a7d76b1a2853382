"""Embeddings with ``max_norm``, whose forward pass shortens the rows of the weight that it looks up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

import sparkhvd.torch as hvd

_Layer = torch.nn.Embedding | torch.nn.EmbeddingBag


@dataclass(frozen=True, eq=False)
class _EmbeddingTable:
    layer: _Layer
    max_norm: float
    seen: torch.Tensor  # whether this rank has looked up the row since the last synchronization

    def watch(self) -> RemovableHandle:
        return self.layer.register_forward_pre_hook(partial(_note_rows, self.seen), with_kwargs=True)


class Renormalization:
    """Shortens the rows of embeddings on every rank as soon as one rank has looked them up.

    One big batch would shorten the rows of all its indices. A single rank shortens only the rows of its own indices, so
    the ranks' weights would differ without this class.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [
            (part, part.max_norm) for part in model.modules() if isinstance(part, _Layer) and part.max_norm is not None
        ]
        self._tables: list[_EmbeddingTable] = []
        self._hooks: list[RemovableHandle] = []

    def attach(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch the layers until ``detach()``, and synchronize before each step of the optimizer, if there is one."""
        if not self._layers:
            return
        self._tables = [_EmbeddingTable(layer, max_norm, _unseen(layer)) for layer, max_norm in self._layers]
        self._hooks = [table.watch() for table in self._tables]
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.synchronize()))

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._tables = [], []

    @torch.no_grad()
    def synchronize(self) -> None:
        """Shorten the rows that other ranks have looked up since the last call; collective."""
        for number, table in enumerate(self._tables):
            layer = table.layer
            indices = hvd.allgather(table.seen.nonzero().flatten(), name=f"renormalized rows {number}")
            elsewhere = torch.zeros_like(table.seen).index_fill_(0, indices, True) & ~table.seen
            others = elsewhere.nonzero().flatten()
            if len(others):
                torch.embedding_renorm_(layer.weight, others, table.max_norm, layer.norm_type)
            table.seen.zero_()


@contextmanager
def rows_keep_their_norms(model: torch.nn.Module) -> Iterator[None]:
    """Look up rows of embeddings in this block without shortening them, for rows of data that do not count."""
    layers = [(part, part.max_norm) for part in model.modules() if isinstance(part, _Layer)]
    for layer, _ in layers:
        layer.max_norm = None
    try:
        yield
    finally:
        for layer, max_norm in layers:
            layer.max_norm = max_norm


def _unseen(layer: _Layer) -> torch.Tensor:
    return torch.zeros(layer.num_embeddings, dtype=torch.bool, device=layer.weight.device)


def _note_rows(
    seen: torch.Tensor, layer: _Layer, arguments: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
) -> None:
    if layer.max_norm is None:
        return
    indices = arguments[0] if arguments else named["input"]
    seen.index_fill_(0, indices.flatten().long(), True)
