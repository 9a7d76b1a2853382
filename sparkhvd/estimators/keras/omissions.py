"""What a ``.keras`` file omits from a model although it changes the training or the output.

The file omits which layers of a subclassed model, and which single variables, are frozen; the variables that the
optimizer excludes from weight decay; and values of user-written layers that their ``get_config`` does not return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

PlainValue = bool | int | float | str | None
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Omissions:
    """The omitted properties of a model; layers and variables are in the order in which Keras lists them.

    Attributes:
        trained_layers: whether each layer with weights is trained.
        trained: whether each weight is trained.
        decayed: whether the optimizer decays each weight; empty if it decays none.
        attributes: the public attributes of each user-written layer that are numbers, strings or None.
    """

    trained_layers: tuple[bool, ...] = ()
    trained: tuple[bool, ...] = ()
    decayed: tuple[bool, ...] = ()
    attributes: tuple[Mapping[str, PlainValue], ...] = ()

    @classmethod
    def of(cls, model: Any, optimizer: Any = None) -> Self:
        """Return what a file of ``model`` and ``optimizer`` omits."""
        decays = getattr(optimizer, "weight_decay", None) is not None
        return cls(
            tuple(bool(layer.trainable) for layer in _layers(model) if layer.weights),
            tuple(bool(weight.trainable) for weight in model.weights),
            tuple(bool(optimizer._use_weight_decay(weight)) for weight in model.weights) if decays else (),  # noqa: SLF001
            tuple(_attributes(layer) for layer in _layers(model) if is_written_by_user(layer)),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Invert ``dataclasses.asdict``."""
        return cls(**{name: tuple(values) for name, values in content.items()})

    def restore(self, model: Any) -> None:
        """Give a model that was loaded from the file what the file omits about its layers and weights."""
        weighted = [layer for layer in _layers(model) if layer.weights]
        for layer, trained in zip(weighted, self.trained_layers, strict=False):
            layer._trainable = trained  # noqa: SLF001  (the public setter also changes the layers within)
        for weight, trained in zip(model.weights, self.trained, strict=False):
            weight.trainable = trained
        own = [layer for layer in _layers(model) if is_written_by_user(layer)]
        for layer, attributes in zip(own, self.attributes, strict=False):
            for name, value in attributes.items():
                if name not in vars(layer) or vars(layer)[name] != value:
                    setattr(layer, name, value)

    def restore_decay(self, optimizer: Any, model: Any) -> None:
        """Exclude the same weights from the weight decay of an optimizer that was loaded from the file."""
        excluded = [weight for weight, decayed in zip(model.weights, self.decayed, strict=False) if not decayed]
        if excluded:
            # The public method refuses an optimizer that has variables.
            optimizer._exclude_from_weight_decay = {optimizer._var_key(weight) for weight in excluded}  # noqa: SLF001
            optimizer._exclude_from_weight_decay_cache = {}  # noqa: SLF001


def lora_weights(model: Any) -> list[list[Any]]:
    """Return the weights of every layer with LoRA, which a file merges into one matrix that no longer learns."""
    return [list(layer.weights) for layer in _layers(model) if getattr(layer, "lora_enabled", False)]


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())  # noqa: SLF001  (no public way to list nested layers)


def is_written_by_user(value: Any) -> bool:
    """Return whether the class of a Keras object is not part of Keras or sparkhvd."""
    return not type(value).__module__.startswith(("keras.", "keras_hub.", "sparkhvd."))


def _attributes(layer: Any) -> dict[str, PlainValue]:
    """Return the public attributes that hold plain values, without those that Keras sets on every model and layer."""
    import keras  # noqa: PLC0415  (readers import Keras only after its backend is known)

    set_by_keras = vars(keras.Model())
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and name not in set_by_keras and type(value) in _PLAIN
    }
