"""Embeddings with ``max_norm``, whose forward pass shortens the rows of the weight that it looks up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

import sparkhvd.torch as hvd

_Layer = torch.nn.Embedding | torch.nn.EmbeddingBag


@dataclass(frozen=True, eq=False)
class _Table:
    layer: _Layer
    seen: torch.Tensor  # whether this rank has looked up the row since the last synchronization

    def watch(self) -> RemovableHandle:
        return self.layer.register_forward_pre_hook(partial(_note_rows, self.seen), with_kwargs=True)


class Renormalization:
    """Shortens the rows of embeddings on every rank as soon as one rank has looked them up.

    One big batch would shorten the rows of all its indices. A rank alone shortens those of its own indices, so without
    this the ranks' weights would differ.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [part for part in model.modules() if isinstance(part, _Layer) and part.max_norm is not None]
        self._tables: list[_Table] = []
        self._hooks: list[RemovableHandle] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the layers until ``detach()``, and synchronize before each step of the optimizer."""
        if not self._layers:
            return
        self._tables = [_Table(layer, _unseen(layer)) for layer in self._layers]
        self._hooks = [table.watch() for table in self._tables]
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
            if len(others) and layer.max_norm is not None:
                torch.embedding_renorm_(layer.weight, others, layer.max_norm, layer.norm_type)
            table.seen.zero_()


def _unseen(layer: _Layer) -> torch.Tensor:
    return torch.zeros(layer.num_embeddings, dtype=torch.bool, device=layer.weight.device)


def _note_rows(
    seen: torch.Tensor, _layer: torch.nn.Module, arguments: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
) -> None:
    indices = arguments[0] if arguments else named["input"]
    seen.index_fill_(0, indices.flatten().long(), True)
