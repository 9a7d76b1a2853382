"""The global settings of the driver's Keras. A ``.keras`` file omits them, but layers that create layers use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import keras


@dataclass(frozen=True)
class KerasSettings:
    """Global settings of Keras in one process.

    Attributes:
        floatx: the default floating-point type.
        epsilon: the fuzz factor of losses and metrics.
        image_data_format: the default order of an image's dimensions.
        dtype_policy: the configuration of the default dtype policy.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: keras.DTypePolicy

    @classmethod
    def current(cls) -> Self:
        """Return the settings of this process."""
        config = keras.config
        policy = keras.dtype_policies.serialize(config.dtype_policy())
        return cls(config.floatx(), config.epsilon(), config.image_data_format(), policy)

    def apply(self) -> None:
        """Apply these settings to this process."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self.dtype_policy))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these settings within the block, if the process has other settings."""
        before = self.current()
        if before == self:
            yield
            return
        self.apply()
        try:
            yield
        finally:
            before.apply()
