"""Preparation of rows."""

from __future__ import annotations

from sparkhvd import prepare_data

__all__ = ["prepare_data"]
