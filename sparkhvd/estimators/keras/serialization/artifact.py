"""A trained Keras model as files.

=================  ==========================================================================================
``model.keras``    the model with its optimizer; ``keras.saving.load_model`` opens it without Spark
``objects.pkl``    the classes and functions that the file refers to by name, a cloudpickle; mostly empty
``ports.json``     the Keras backend, the mapping of columns, Keras' settings, and omissions of ``model.keras``
=================  ==========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.estimators.keras.inputs import Port, Ports
from sparkhvd.estimators.keras.serialization.omissions import Omissions, vocabularies_in_configs

if TYPE_CHECKING:
    import keras

    from sparkhvd.estimators.keras.serialization.package import Named
    from sparkhvd.estimators.keras.settings import KerasSettings

MODEL, OBJECTS, PORTS = "model.keras", "objects.pkl", "ports.json"


def save(folder: Path, model: keras.Model, objects: Mapping[str, Named], inputs: Ports, outputs: Ports) -> None:
    """Write a model, the objects that it refers to by name, and its mapping of columns into ``folder``."""
    import keras  # noqa: PLC0415  (loading sets Keras' backend before it imports Keras)

    from sparkhvd.estimators.keras.settings import KerasSettings  # noqa: PLC0415

    with vocabularies_in_configs(model):
        keras.saving.save_model(model, folder / MODEL)
    (folder / OBJECTS).write_bytes(dumps(dict(objects)))
    content = {"backend": keras.config.backend(), "inputs": asdict(inputs), "outputs": asdict(outputs)}
    content["settings"] = asdict(KerasSettings.current())
    content["omissions"] = asdict(Omissions.of(model, getattr(model, "optimizer", None)))
    (folder / PORTS).write_text(json.dumps(content))


def load_model(folder: Path, *, compiled: bool) -> keras.Model:
    """Load the model that ``save`` wrote. This runs code from ``objects.pkl``: load trusted files only."""
    from sparkhvd.estimators.keras.serialization.package import load, register_names  # noqa: PLC0415  (imports Keras)

    objects = cloudpickle.loads((folder / OBJECTS).read_bytes())
    omissions = Omissions.from_json(_content(folder).get("omissions", {}))
    with load_settings(folder).applied():
        model = load(folder / MODEL, objects, omissions, compiled=compiled)
    register_names(objects)
    return model


def load_backend(folder: Path) -> str:
    """Return the Keras backend that the model was trained on."""
    return str(_content(folder)["backend"])


def load_settings(folder: Path) -> KerasSettings:
    """Return the settings of the Keras that trained the model."""
    from sparkhvd.estimators.keras.settings import KerasSettings  # noqa: PLC0415

    content = _content(folder).get("settings")
    return KerasSettings.current() if content is None else KerasSettings(**content)


def load_ports(folder: Path) -> tuple[Ports, Ports]:
    """Return the inputs and outputs of the model that ``save`` wrote."""
    content = _content(folder)
    return _ports(content["inputs"]), _ports(content["outputs"])


def _content(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / PORTS).read_text())
    return content


def _ports(content: dict[str, Any]) -> Ports:
    ports = [
        Port(
            name=port["name"],
            columns=tuple(port["columns"]),
            shape=None if port["shape"] is None else tuple(port["shape"]),
            dtype=port["dtype"],
            sparse=port.get("sparse"),
        )
        for port in content["ports"]
    ]
    order = content.get("order")
    return Ports(tuple(ports), content["structure"], None if order is None else tuple(order))
