"""``sparkdl.HorovodRunner`` of Databricks' ML runtimes, on top of ``sparkhvd.run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sparkhvd

__all__ = ["HorovodRunner"]


class HorovodRunner:
    """Runs a function on the ranks of a Spark cluster.

    Args:
        np: the number of ranks on the executors; a negative number starts that many on the driver; 0 takes all slots.
        driver_log_verbosity: "all" shows the output of ranks on executors; "log_callback_only" leaves it in the logs of
            the executors. The output of ranks on the driver is always shown.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in {"all", "log_callback_only"}:
            raise ValueError(f"driver_log_verbosity={driver_log_verbosity!r} must be 'all' or 'log_callback_only'.")
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)`` on every rank and return the result of rank 0."""
        on_driver = self.num_processor < 0
        return sparkhvd.run(
            main,
            kwargs=kwargs,
            num_proc=abs(self.num_processor) or None,
            launcher="local" if on_driver else "auto",
            verbose=int(on_driver or self.driver_log_verbosity == "all"),
        )[0]
