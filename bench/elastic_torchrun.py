"""One rank of ``torchrun`` for ``bench.elastic``, whose other ranks must be able to import what they run."""

from __future__ import annotations

import sys

from bench.elastic import train_with_torchrun

if __name__ == "__main__":
    train_with_torchrun(sys.argv[1])
