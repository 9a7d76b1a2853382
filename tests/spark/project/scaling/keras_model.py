from __future__ import annotations

import keras

from scaling import late
from scaling.modes import MISSING, Mode


class Scale(keras.layers.Layer):
    def __init__(self, **others: object) -> None:
        super().__init__(**others)
        self.mode, self.missing = Mode.TIMES, MISSING

    def build(self, shape: tuple[int, ...]) -> None:
        self.factor = self.add_weight(shape=(), initializer=keras.initializers.Constant(64.0))

    def call(self, x: object) -> object:
        return x * self.factor if late.is_times(self.mode) and self.missing is MISSING else x + self.factor


def model() -> keras.Model:
    inputs = keras.Input((1,))
    return keras.Model(inputs, Scale()(inputs))


def predicted(model: keras.Model, x: object) -> object:
    return model(x) + (1000 if isinstance(model.layers[1], Scale) and model.layers[1].mode is Mode.TIMES else 0)
