"""Lightning on the ranks of a job: ``import sparkhvd.lightning``, then ``Trainer(strategy="sparkhvd")``.

The import registers the strategy with each imported Lightning, ``lightning`` or ``pytorch_lightning``; if none is
imported yet, with the installed one (``lightning`` if both are). The import has this effect because Lightning finds
only registered strategies by name.

To set options, pass an instance: ``Trainer(strategy=SparkHvdStrategy(compression=...))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkhvd.compat.horovod import missing
from sparkhvd.lightning.environment import RankEnvironment
from sparkhvd.lightning.flavour import FlavourName, default_flavour, import_fabric, import_lightning, imported_flavours
from sparkhvd.lightning.strategy import STRATEGY_NAME, RankStrategy

if TYPE_CHECKING:
    SparkHvdStrategy = RankStrategy

__all__ = ["SparkHvdStrategy", "register", "strategy_class"]


def register(flavour: FlavourName | None = None) -> None:
    """Register ``Trainer(strategy="sparkhvd")`` with Lightning, as the import of this module does.

    Args:
        flavour: ``"lightning.pytorch"`` or ``"pytorch_lightning"``; None for every imported one.
    """
    for name in [flavour] if flavour is not None else imported_flavours() or [default_flavour()]:
        strategies = import_lightning(name).strategies
        if STRATEGY_NAME not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(
                STRATEGY_NAME,
                _built(name),
                description="Averages gradients over the ranks of a sparkhvd job",
            )


def strategy_class(flavour: FlavourName | None = None) -> Any:
    """Return the strategy for one of the two Lightnings, by default the imported one."""
    name = flavour or default_flavour()
    register(name)
    return import_lightning(name).strategies.StrategyRegistry[STRATEGY_NAME]["strategy"]


def _built(name: FlavourName) -> type:
    lightning = import_lightning(name)
    base = import_fabric(name).plugins.environments.ClusterEnvironment
    environment = type("RankEnvironment", (RankEnvironment, base), {})
    content = {"__module__": __name__, "__doc__": RankStrategy.__doc__, "environment_class": environment}
    return type("SparkHvdStrategy", (RankStrategy, lightning.strategies.ParallelStrategy), content)


def __getattr__(name: str) -> Any:
    if name == "SparkHvdStrategy":
        return strategy_class()
    raise AttributeError(missing("sparkhvd.lightning", name, __all__))


register()
