"""Search the parameters of an estimator with Optuna; every trial is a fit, and all trials share the prepared rows."""

from __future__ import annotations

from sparkhvd.tune.halving import SuccessiveHalving
from sparkhvd.tune.reports import TrialReports
from sparkhvd.tune.search import SearchResult, maximize, minimize

__all__ = ["SearchResult", "SuccessiveHalving", "TrialReports", "maximize", "minimize"]
