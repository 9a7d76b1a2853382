"""Loss scaling: all ranks skip the same steps of a ``LossScaleOptimizer``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras


@functools.cache
def make_ranks_skip_together() -> None:
    """Make every ``LossScaleOptimizer`` around a distributed optimizer ask all ranks whether gradients are finite.

    Keras checks only this rank's gradients, before their exchange. A rank with infinite gradients would skip the
    exchange in which the others wait. ``compile`` itself creates the ``LossScaleOptimizer`` of a model in
    ``mixed_float16``, so a subclass cannot take its place.
    """
    kind = keras.optimizers.LossScaleOptimizer
    check_own = kind.check_finite

    @functools.wraps(check_own)
    def check_all(optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any]) -> Any:
        finite = check_own(optimizer, grads)
        ask_all_ranks = getattr(optimizer.inner_optimizer, "finite_on_all_ranks", None)
        return finite if ask_all_ranks is None else ask_all_ranks(finite)

    kind.check_finite = check_all
