"""Makes TensorFlow and Keras import in half the time, in every process of the tests.

These frameworks import JAX, Matplotlib, scikit-learn, SciPy, pandas and IPython where they are installed, as they are
for the tests: that takes longer than their own modules. Here the frameworks do not find them. All other code does.

`make` copies this file into the environment, where the processes that the tests start run it before anything else (see
``.venv/.lean-imports`` in the Makefile).
"""

from __future__ import annotations

import sys

_FRAMEWORKS = frozenset({"keras", "tensorflow"})
_HIDDEN = frozenset({"IPython", "jax", "matplotlib", "pandas", "scipy", "sklearn"})


class _HidingFinder:
    """Stands before the other finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package = name.partition(".")[0]
        if package in _HIDDEN and _importer() in _FRAMEWORKS:
            raise ModuleNotFoundError(f"The tests hide {package!r} from frameworks.", name=name)


def _importer() -> str:
    """Return the package whose code imports a module now."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in {"importlib", "_frozen_importlib"}:
            return package
        frame = frame.f_back
    return ""


def install() -> None:
    """Hide the packages in this process."""
    if _HidingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _HidingFinder)
