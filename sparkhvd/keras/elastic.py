"""Says that there is no elastic training yet."""

from __future__ import annotations

from sparkhvd.moved import ELASTIC

raise ImportError(ELASTIC)
