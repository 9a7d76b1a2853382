"""A trained Keras model as files.

=================  ==========================================================================================
``model.keras``    the model with its optimizer; ``keras.saving.load_model`` opens it without Spark
``objects.pkl``    the classes and functions that the file knows by name, a cloudpickle; empty in most cases
``ports.json``     the Keras backend, and which columns make which input
=================  ==========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle

from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.estimators.keras.inputs import Port, Ports

MODEL, OBJECTS, PORTS = "model.keras", "objects.pkl", "ports.json"


def save(folder: Path, model: Any, objects: Mapping[str, Any], inputs: Ports, outputs: Ports) -> None:
    """Write a model, the objects that it knows by name, and how columns become its inputs into ``folder``."""
    import keras  # noqa: PLC0415  (reading needs Keras only once its backend is known)

    keras.saving.save_model(model, folder / MODEL)
    (folder / OBJECTS).write_bytes(dumps(dict(objects)))
    content = {"backend": keras.config.backend(), "inputs": asdict(inputs), "outputs": asdict(outputs)}
    (folder / PORTS).write_text(json.dumps(content))


def load_model(folder: Path, *, compiled: bool) -> Any:
    """The model of ``save``. Runs the code in ``objects.pkl``: open only what you trust."""
    from sparkhvd.estimators.keras.package import load, register_names  # noqa: PLC0415  (imports Keras)

    objects = cloudpickle.loads((folder / OBJECTS).read_bytes())
    model = load(folder / MODEL, objects, compiled=compiled)
    register_names(objects)
    return model


def load_backend(folder: Path) -> str:
    """The Keras backend that the model was trained with."""
    return str(json.loads((folder / PORTS).read_text())["backend"])


def load_ports(folder: Path) -> tuple[Ports, Ports]:
    """Inputs and outputs of the model of ``save``."""
    content = json.loads((folder / PORTS).read_text())
    return _ports(content["inputs"]), _ports(content["outputs"])


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
