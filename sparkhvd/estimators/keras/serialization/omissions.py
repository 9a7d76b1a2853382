"""The properties of a model that a ``.keras`` file omits although they affect the training or the output.

The file omits:

- which layers of a subclassed model, and which individual variables, are frozen;
- which variables the optimizer excludes from weight decay;
- attributes of user-written layers that their ``get_config`` does not return;
- arguments of Keras' own losses and metrics, such as ``Huber.delta``;
- ``lora_alpha`` of ``Dense`` and ``Embedding``: Keras saves it, but does not load it.

The file would also corrupt some words of adapted layers; ``vocabularies_in_configs`` prevents this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import keras

PlainValue = bool | int | float | str | None
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Omissions:
    """The omitted properties of a model; layers are in Keras' order, weights in the order of ``_weights``.

    Attributes:
        trained_layers: whether each layer with weights is trained.
        trained: whether each weight is trained.
        decayed: whether the optimizer decays each weight; empty if the optimizer decays no weights.
        attributes: the public attributes of each user-written layer that are numbers, booleans, strings or None.
        arguments: ``function_arguments`` of each loss and metric that the model is compiled with; None if an argument
            is not a plain value.
        lora_alphas: the ``lora_alpha`` of each layer with LoRA; None in versions of Keras without it.
    """

    trained_layers: tuple[bool, ...] = ()
    trained: tuple[bool, ...] = ()
    decayed: tuple[bool, ...] = ()
    attributes: tuple[Mapping[str, PlainValue], ...] = ()
    arguments: tuple[Mapping[str, object] | None, ...] = ()
    lora_alphas: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> Self:
        """Return the properties that a file of ``model`` and ``optimizer`` omits."""
        decaying = None if getattr(optimizer, "weight_decay", None) is None else optimizer
        return replace(
            cls.of_training(model),
            decayed=() if decaying is None else tuple(bool(decaying._use_weight_decay(w)) for w in _weights(model)),  # noqa: SLF001
            attributes=tuple(_attributes(layer) for layer in _layers(model) if is_written_by_user(layer)),
            arguments=tuple(_plain(function_arguments(function)) for function in _losses_and_metrics(model)),
            lora_alphas=tuple(getattr(layer, "lora_alpha", None) for layer in _lora_layers(model)),
        )

    @classmethod
    def of_training(cls, model: keras.Model) -> Self:
        """Return only which layers and weights of ``model`` are trained."""
        return cls(
            tuple(bool(layer.trainable) for layer in _layers(model) if layer.weights),
            tuple(bool(weight.trainable) for weight in _weights(model)),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Iterable[Any]]) -> Self:
        """Invert ``dataclasses.asdict``; fields that only other versions write are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: tuple(values) for name, values in content.items() if name in known})

    def restore(self, model: keras.Model) -> None:
        """Restore the omitted properties of layers and weights in a model that was loaded from the file."""
        weighted = [layer for layer in _layers(model) if layer.weights]
        for layer, trained in zip(weighted, self.trained_layers, strict=False):
            layer._trainable = trained  # noqa: SLF001  (the public setter also changes the layers within)
        for weight, trained in zip(_weights(model), self.trained, strict=False):
            weight.trainable = trained
        user_layers = [layer for layer in _layers(model) if is_written_by_user(layer)]
        for layer, attributes in zip(user_layers, self.attributes, strict=False):
            for name, value in attributes.items():
                if name not in vars(layer) or vars(layer)[name] != value:
                    setattr(layer, name, value)
        for layer, alpha in zip(_lora_layers(model), self.lora_alphas, strict=False):
            if alpha is not None:
                layer.lora_alpha = alpha

    def restore_functions(self, model: keras.Model) -> None:
        """Restore the arguments of losses and metrics in a compiled model that was loaded from the file."""
        for function, arguments in zip(_losses_and_metrics(model), self.arguments, strict=False):
            if arguments is not None and function_arguments(function) is not None:
                function._fn_kwargs = dict(arguments)  # noqa: SLF001

    def restore_decay(self, optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
        """Exclude the same weights from weight decay as the saved optimizer, in one that was loaded from the file."""
        excluded = [weight for weight, decayed in zip(_weights(model), self.decayed, strict=False) if not decayed]
        if excluded:
            # The public method raises an error once the optimizer has been built.
            optimizer._exclude_from_weight_decay = {optimizer._var_key(weight) for weight in excluded}  # noqa: SLF001
            optimizer._exclude_from_weight_decay_cache = {}  # noqa: SLF001


def lora_weights(model: keras.Model) -> list[list[keras.Variable]]:
    """Return the weights of every layer with LoRA.

    A file merges the weights of a layer into one matrix, and Keras loads zeros for both LoRA matrices.
    """
    return [list(layer.weights) for layer in _lora_layers(model)]


def initialize_lora(model: keras.Model) -> None:
    """Make the LoRA matrices of a loaded model learn: the gradients of two matrices of zeros are zero.

    As in ``enable_lora``, the first matrix becomes random, and the second one stays zero.
    """
    import keras  # noqa: PLC0415  (loading sets Keras' backend before it imports Keras)

    for seed, layer in enumerate(_lora_layers(model)):
        for name in ("lora_kernel_a", "lora_embeddings_a"):
            matrix = getattr(layer, name, None)
            if matrix is not None and not keras.ops.convert_to_numpy(matrix).any():
                matrix.assign(keras.initializers.HeUniform(seed)(matrix.shape, matrix.dtype))


def function_arguments(value: object) -> dict[str, object] | None:
    """Return the arguments that a loss or a metric passes to its function; None for any other object."""
    arguments = getattr(value, "_fn_kwargs", None)
    return dict(arguments) if isinstance(arguments, Mapping) else None


def leaves(value: object) -> list[Any]:
    """Return the objects in nested lists, tuples and dicts, except None and strings."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None or isinstance(value, str) else [value]


def _losses_and_metrics(model: keras.Model) -> list[keras.losses.Loss | keras.metrics.Metric]:
    """Return the losses and metrics that ``compile`` received, in order; Keras has no public way to read them."""
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    compiled = (
        getattr(loss, "_user_loss", None),
        getattr(metrics, "_user_metrics", None),
        getattr(metrics, "_user_weighted_metrics", None),
    )
    return leaves(list(compiled))


def _plain(arguments: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Return the arguments if all of them are plain values, which JSON can hold; otherwise None."""
    return arguments if arguments is not None and all(type(x) in _PLAIN for x in arguments.values()) else None


def _layers(model: keras.Model) -> list[keras.Layer]:
    return list(model._flatten_layers())  # noqa: SLF001  (no public way to list nested layers)


def _lora_layers(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in _layers(model) if getattr(layer, "lora_enabled", False)]


def _weights(model: keras.Model) -> list[keras.Variable]:
    """Return the weights in an order that a file keeps: a loaded float8 layer has its scales before its kernel."""
    return sorted(model.weights, key=lambda weight: bool(getattr(weight, "overwrite_with_gradient", False)))


@contextmanager
def vocabularies_in_configs(model: keras.Model) -> Iterator[None]:
    """Store vocabularies in the configurations of their layers, if necessary, while a model is saved in this block.

    Keras saves a vocabulary as a text file with one word per line. Such a file cannot hold words with line breaks, or
    an empty last word: Keras would load other words, or reject the file because of duplicates. If a layer was created
    with a vocabulary, Keras saves that one, even after ``set_vocabulary`` has replaced it.
    """
    lookups = [lookup for lookup in map(_lookup, _layers(model)) if lookup is not None and not _is_saved(lookup)]
    before = [(lookup.input_vocabulary, lookup.input_idf_weights) for lookup in lookups]
    for lookup in lookups:
        lookup.input_vocabulary = _words(lookup)
        if lookup.output_mode == "tf_idf":
            lookup.input_idf_weights = lookup.idf_weights_const.numpy().tolist()
    try:
        yield
    finally:
        for lookup, (words, weights) in zip(lookups, before, strict=True):
            lookup.input_vocabulary, lookup.input_idf_weights = words, weights


def _lookup(layer: keras.Layer) -> keras.layers.StringLookup | keras.layers.IntegerLookup | None:
    """Return the lookup layer with the vocabulary of a layer; None if there is none."""
    import keras  # noqa: PLC0415  (loading sets Keras' backend before it imports Keras)

    kinds = keras.layers.StringLookup | keras.layers.IntegerLookup | keras.layers.TextVectorization
    return getattr(layer, "_lookup_layer", layer) if isinstance(layer, kinds) else None


def _words(lookup: keras.layers.StringLookup | keras.layers.IntegerLookup, **options: bool) -> list[str | int]:
    import keras  # noqa: PLC0415  (loading sets Keras' backend before it imports Keras)

    kind: type[str] | type[int] = int if isinstance(lookup, keras.layers.IntegerLookup) else str
    return [kind(word) for word in lookup.get_vocabulary(**options)]


def _is_saved(lookup: keras.layers.StringLookup | keras.layers.IntegerLookup) -> bool:
    """Return whether Keras saves the vocabulary of a lookup layer correctly, in its configuration or as lines."""
    words = _words(lookup)
    if lookup.input_vocabulary is None:
        lines = list(map(str, words))
        return "\n".join(lines).splitlines() == lines
    return list(lookup.input_vocabulary) in (words, _words(lookup, include_special_tokens=False))


def is_written_by_user(value: object) -> bool:
    """Return whether the class of a Keras object belongs neither to Keras nor to sparkhvd."""
    return not type(value).__module__.startswith(("keras.", "keras_hub.", "sparkhvd."))


def _attributes(layer: keras.Layer) -> dict[str, PlainValue]:
    """Return the public attributes that hold plain values, except those that Keras sets on every model or layer."""
    import keras  # noqa: PLC0415  (loading sets Keras' backend before it imports Keras)

    set_by_keras = vars(keras.Model())
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and name not in set_by_keras and type(value) in _PLAIN
    }
