"""Describe the machine on which a table was measured."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def describe() -> str:
    """Return the processor, versions, and the machine's load before the measurement."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC\n{load()}"
    )


def load() -> str:
    """Return the machine's current load, and whether absolute figures are reliable."""
    average = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    verdict = "quiet" if average < 0.3 * cores else "BUSY: look at the ratios, not at the figures"
    return f"load average {average:.1f} on {cores} cores ({verdict})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
