"""Backends, which start the ranks of a ``fit``."""

from __future__ import annotations

from sparkhvd.estimators.params.backend import Backend, SparkBackend

__all__ = ["Backend", "SparkBackend"]
