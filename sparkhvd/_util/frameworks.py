"""The table of frameworks, for modules that serve all of them; nothing here imports a framework or its estimator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from sparkhvd._util.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework.

    Attributes:
        title: its name in messages.
        estimator: the name of its estimator.
        packages: the packages of its models, optimizers and losses.
        libraries: other packages that are part of it.
        versions: the packages whose versions should be equal on the driver and in all tasks, with the other module and
            distribution names of each.
        describe: ``module:function``. It takes (object, form), and returns the canonical form of the framework's
            objects for the identity of a run, or None for other objects; see ``estimators.runs.canonical``. Empty if
            the function of another framework covers them.
        contents: ``module:function``. It takes (object), and returns the ``TensorContent`` of the framework's tensors,
            or None for other objects; see ``estimators.runs.canonical``. Empty if ``numpy.asarray(tensor.numpy())``
            returns the content.
        seeding: the function that seeds the framework's random numbers; empty if it only uses NumPy's.
        tensor_errors: packages that report unsuitable tensors with errors of their own types.
    """

    title: str
    estimator: str
    packages: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    describe: str = ""
    contents: str = ""
    seeding: str = ""
    tensor_errors: tuple[str, ...] = ()


# A framework is one folder and one row here, or an entry point of another package; each names a ``Framework``.
FRAMEWORKS = Registry(
    "sparkhvd.frameworks",
    MappingProxyType(
        {
            "torch": "sparkhvd.estimators.torch:FRAMEWORK",
            "keras": "sparkhvd.estimators.keras:FRAMEWORK",
            "lightning": "sparkhvd.estimators.lightning:FRAMEWORK",
        }
    ),
)


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return all frameworks, those of other packages last.

    The result is cached, because looking for entry points takes milliseconds per call. A package that is installed
    later counts after a restart.
    """
    return tuple(FRAMEWORKS.load(name) for name in (*FRAMEWORKS.own, *FRAMEWORKS.added()))


def framework_of(value: object) -> str | None:
    """Return the package of the framework that an object, function or class comes from; None if it is unknown.

    A user's class belongs to the framework of its nearest base class.
    """
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    modules = [getattr(value, "__module__", None), *(base.__module__ for base in classes)]
    known = {package for framework in frameworks() for package in framework.packages}
    packages = (str(module).partition(".")[0] for module in modules)
    return next((package for package in packages if package in known), None)


def estimator_hint(value: object, own: Collection[str]) -> str:
    """Return a sentence that names the estimator for an object of a framework outside ``own``; else an empty string."""
    package = framework_of(value)
    if package is None or package in own:
        return ""
    framework = next(framework for framework in frameworks() if package in framework.packages)
    return f" Use {framework.estimator} for {framework.title} objects."
