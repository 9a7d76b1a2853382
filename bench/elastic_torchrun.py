"""Run one rank of ``torchrun`` for ``bench.elastic``; ``torchrun`` needs a module to start."""

from __future__ import annotations

import sys

from bench.elastic import train_with_torchrun

if __name__ == "__main__":
    train_with_torchrun(sys.argv[1])
