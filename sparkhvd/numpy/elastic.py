"""Elastic training without a framework: ``hvd.elastic.run``, ``hvd.elastic.ObjectState``."""

from __future__ import annotations

from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
