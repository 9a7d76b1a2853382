"""Models, optimizers and losses of another framework than an estimator's: which estimator takes them."""

from __future__ import annotations

from collections.abc import Collection

# By the package of a class; known without importing any of them.
_FRAMEWORKS = {
    "keras": ("Keras", "KerasEstimator"),
    "lightning": ("Lightning", "LightningEstimator"),
    "pytorch_lightning": ("Lightning", "LightningEstimator"),
    "torch": ("PyTorch", "TorchEstimator"),
}


def framework_of(given: object) -> str | None:
    """The package that an object, function or class comes from, as far as it is one of a framework with an estimator.

    A class of the user's comes from where its nearest base comes from.
    """
    classes = given.__mro__ if isinstance(given, type) else type(given).__mro__
    modules = [getattr(given, "__module__", None), *(each.__module__ for each in classes)]
    packages = (str(module).partition(".")[0] for module in modules)
    return next((package for package in packages if package in _FRAMEWORKS), None)


def estimator_hint(given: object, own: Collection[str]) -> str:
    """A sentence that names the estimator for an object of a framework that is none of ``own``; else nothing."""
    framework = framework_of(given)
    if framework is None or framework in own:
        return ""
    name, estimator = _FRAMEWORKS[framework]
    return f" Use {estimator} for {name} objects."
