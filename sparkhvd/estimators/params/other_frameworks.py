"""Hints for models, optimizers and losses that belong to the estimator of another framework."""

from __future__ import annotations

from collections.abc import Collection

# By the package of a class, so that no framework is imported.
_FRAMEWORKS = {
    "keras": ("Keras", "KerasEstimator"),
    "lightning": ("Lightning", "LightningEstimator"),
    "pytorch_lightning": ("Lightning", "LightningEstimator"),
    "torch": ("PyTorch", "TorchEstimator"),
}


def framework_of(value: object) -> str | None:
    """Return the package of the framework that an object, function or class comes from; None if it is none of these.

    A user's class belongs to the framework of its nearest base class.
    """
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    modules = [getattr(value, "__module__", None), *(base.__module__ for base in classes)]
    packages = (str(module).partition(".")[0] for module in modules)
    return next((package for package in packages if package in _FRAMEWORKS), None)


def estimator_hint(value: object, own: Collection[str]) -> str:
    """Return a sentence that names the estimator for an object of a framework outside ``own``; else an empty string."""
    framework = framework_of(value)
    if framework is None or framework in own:
        return ""
    name, estimator = _FRAMEWORKS[framework]
    return f" Use {estimator} for {name} objects."
