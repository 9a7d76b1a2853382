"""Run one rank of ``torchrun`` for a benchmark: ``torchrun`` needs a module to start.

python -m bench.elastic_torchrun BENCHMARK FOLDER
"""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    import_module(f"bench.{sys.argv[1]}").train_with_torchrun(sys.argv[2])
