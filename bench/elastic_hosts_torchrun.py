"""Run one rank of ``torchrun`` for ``bench.elastic_hosts``; ``torchrun`` needs a module to start."""

from __future__ import annotations

import sys

from bench.elastic_hosts import train_with_torchrun

if __name__ == "__main__":
    train_with_torchrun(sys.argv[1])
