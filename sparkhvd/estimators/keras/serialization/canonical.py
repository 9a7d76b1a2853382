"""The canonical form of Keras objects, for the identity of a run."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from types import FunctionType
from typing import TYPE_CHECKING

from sparkhvd.errors import ParamError
from sparkhvd.estimators.runs.canonical import (
    CanonicalForm,
    is_plain,
    is_tensor,
    names_of_installed_bases,
    qualified_name,
)
from sparkhvd.estimators.runs.function_globals import module_is_installed

if TYPE_CHECKING:
    import keras

# The number that Keras appends to a name, or to a name in the path of a variable.
AUTOMATIC_NUMBER = re.compile(r"_\d+(?=/|$)")


def describe(value: object, form: CanonicalForm) -> list[object] | None:
    """Return the form of a model, layer, optimizer, loss, metric or callback; None for any other object.

    Raises:
        ParamError: the object has no configuration.
    """
    return _keras_object_form(form, value) if callable(getattr(value, "get_config", None)) else None


def _keras_object_form(form: CanonicalForm, value: keras.Layer) -> list[object]:
    """Return the configuration and the content that it omits, such as functions, weights and vocabularies."""
    try:
        config = value.get_config()
    except NotImplementedError as error:
        raise ParamError(
            "resume='auto' identifies a run by its parameters, but the content of the "
            f"{qualified_name(type(value))} in {form.parameter} cannot be determined: it has no get_config. "
            "Define get_config, or pass a run_id instead."
        ) from error
    own = vars(value)
    layers = [layer for layer in _layers(value) if layer is not value]
    form.add_parts((*getattr(value, "weights", ()), *layers))
    return [
        *([_settings()] if layers else []),
        form.of(type(value)),
        form.of(_renumbered({"class_name": type(value).__name__, "config": config})),
        *([] if (inner := getattr(value, "inner_optimizer", None)) is None else [form.of(inner)]),
        [form.of(own.get(name)) for name in ("fn", "_fn", "_fn_kwargs", "function")],
        [form.of(getattr(value, name, None)) for name in ("optimizer", "loss") if layers],
        [
            [form.of(type(layer)), form.of(vars(layer).get("function")), _user_code_form(form, layer)]
            for layer in layers
        ],
        _user_code_form(form, value),
        *(
            form.of(getattr(own.get("_compile_metrics"), name, None))
            for name in ("_user_metrics", "_user_weighted_metrics")
        ),
        form.of(getattr(own.get("_compile_loss"), "_user_loss_weights", None)),
        [
            (form.of_tensor(weight, exact=form.weights), bool(weight.trainable))
            for weight in getattr(value, "weights", ())
        ],
        [_vocabulary_form(form, layer) for layer in (value, *layers)],
        *_state_form(form, value),
    ]


def _settings() -> object:
    """Return the settings of the driver's Keras, which the ranks use, too."""
    from sparkhvd.estimators.keras.settings import KerasSettings  # noqa: PLC0415  (it imports Keras)

    return [str(setting) for setting in astuple(KerasSettings.current())]


def _user_code_form(form: CanonicalForm, value: keras.Layer) -> list[object]:
    """Return the user's code in a Keras object; the configuration contains at most the names of this code."""
    attributes = {name: item for name, item in sorted(vars(value).items()) if _is_user_code(item)}
    if not module_is_installed(type(value).__module__):
        inner = names_of_installed_bases(type(value))
        attributes |= {
            name: item
            for name, item in sorted(vars(value).items())
            if not name.startswith("_") and name not in inner and is_plain(item)
        }
    return [(name, form.if_describable(item)) for name, item in sorted(attributes.items())]


def _vocabulary_form(form: CanonicalForm, value: keras.Layer) -> list[object]:
    """Return the words that a lookup layer was adapted to, and their weights; the configuration may not contain them.

    A text layer has a lookup layer, which is one of the model's layers, too.
    """
    import keras  # noqa: PLC0415  (the caller's Keras object has imported it)

    if not isinstance(value, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return []
    return [form.of(value.get_vocabulary()), form.of(getattr(value, "idf_weights_const", None))]


def adapted_values(model: keras.Model) -> dict[str, str]:
    """Return the digests of what the layers of a model have learned in ``adapt`` besides weights, by layer name."""
    import keras  # noqa: PLC0415  (the caller's Keras object has imported it)

    values: dict[str, Sequence[object]] = {}
    for index, layer in enumerate(_layers(model)):
        name = f"{index}: {AUTOMATIC_NUMBER.sub('', layer.name)}"
        if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
            values[name] = layer.get_vocabulary()
        elif isinstance(layer, keras.layers.Discretization):
            values[name] = () if layer.bin_boundaries is None else layer.bin_boundaries
    texts = {name: json.dumps([str(item) for item in items]) for name, items in values.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:32] for name, text in texts.items()}


def _state_form(form: CanonicalForm, value: keras.Layer) -> list[object]:
    """Return the variables of a Keras optimizer after its first step, and its exclusions from weight decay."""
    if not callable(getattr(value, "apply_gradients", None)):
        return []
    pattern = getattr(value, "_exclude_from_weight_decay_pattern", None)
    names = [] if pattern is None else sorted(pattern.pattern.split("|"))  # Keras joins the names of a set
    keys = getattr(value, "_exclude_from_weight_decay", ())
    # Keras identifies the weights by numbers that differ in every process; form.parts has those of the model.
    key_of = value._var_key if keys else id  # noqa: SLF001
    weights = [index for index, part in enumerate(form.parts) if is_tensor(part) and key_of(part) in keys]
    excluded = [*names, *([[weights, len(keys)]] if keys else [])]
    trained = int(value.iterations.numpy()) > 0
    state = [form.of_tensor(variable, exact=True) for variable in value.variables] if trained else []
    return [part for part in (state, excluded) if part]


def _renumbered(config: object) -> object:
    """Return a Keras configuration whose automatic names begin at 0, because Keras counts per process."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name, base in _automatic_names(config):
        if name not in names:
            names[name] = f"{base}#{counts[base]}"
            counts[base] += 1

    def put(part: object) -> object:
        if isinstance(part, Mapping):
            if part.get("class_name") == "__lambda__":
                return "lambda"  # its bytes contain the file and the line; the form contains the function itself, too
            return {key: put(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [put(item) for item in part]
        return names.get(part, part) if isinstance(part, str) else part

    return put(config)


def _automatic_names(part: object) -> Iterator[tuple[str, str]]:
    """Yield the names that Keras derived from class names, in order, with and without their number."""
    if isinstance(part, Mapping):
        own = part.get("config")
        name = str(own.get("name")) if isinstance(own, Mapping) else ""
        base = AUTOMATIC_NUMBER.sub("", name)
        if base.replace("_", "").lower() == str(part.get("class_name")).lower():
            yield name, base
    items = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    for item in items:
        yield from _automatic_names(item)


def _is_user_code(value: object) -> bool:
    """Return whether the user wrote the code of a value; Keras layers have forms of their own."""
    if isinstance(value, functools.partial):
        return _is_user_code(value.func)
    if isinstance(value, list | tuple):
        return any(map(_is_user_code, value))
    if isinstance(value, dict):
        return any(map(_is_user_code, value.values()))
    if isinstance(value, FunctionType | type):
        return not module_is_installed(value.__module__)
    return not module_is_installed(type(value).__module__) and not hasattr(value, "_flatten_layers")


def _layers(value: keras.Layer) -> list[keras.Layer]:
    flatten = getattr(value, "_flatten_layers", None)  # Keras has no public iterator over nested layers
    return list(flatten()) if callable(flatten) else []
