"""Broadcasts and gathers of parameters, states and objects."""

from __future__ import annotations

from sparkhvd.torch.states import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
