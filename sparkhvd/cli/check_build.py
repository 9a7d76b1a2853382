"""The output of ``sparkhvdrun --check-build``."""

from __future__ import annotations

from importlib.util import find_spec

import sparkhvd
from sparkhvd.comm import features


def check_build() -> str:
    """Return a table of the available features, in Horovod's format."""
    frameworks = {"TensorFlow": "tensorflow", "Keras": "keras", "PyTorch": "torch", "Lightning": "lightning"}
    parts = {
        "Available Frameworks": {name: find_spec(module) is not None for name, module in frameworks.items()},
        "Available Controllers": {"MPI": features.mpi_built(), "Gloo": features.gloo_built(), "sparkhvd": True},
        "Available Tensor Operations": {
            "NCCL": bool(features.nccl_built()),
            "DDL": features.ddl_built(),
            "CCL": features.ccl_built(),
            "MPI": False,
            "Gloo": features.gloo_built(),
            "sparkhvd": True,
        },
    }
    lines = [f"sparkhvd v{sparkhvd.__version__}:"]
    for title, rows in parts.items():
        lines += ["", f"{title}:", *(f"    [{'X' if available else ' '}] {name}" for name, available in rows.items())]
    return "\n".join(lines)
