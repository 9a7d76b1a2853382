"""The plan of a fit after its ranks, its run and its seed are decided."""

from __future__ import annotations

from dataclasses import dataclass

from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.estimators.runs.run_lease import RunLease


@dataclass(frozen=True, kw_only=True)
class RunPlan(FitPlan):
    """A plan with a fixed number of ranks, run id and seed.

    Attributes:
        division_proc: number of ranks over which the rows are divided; a resumed run keeps its earlier number.
        facts: the model's facts for checkpoints; None without a Store.
        lease: the lease of the run; None if no run is kept.
    """

    num_proc: int
    run_id: str
    random_seed: int
    division_proc: int
    facts: ModelFacts | None
    lease: RunLease | None
