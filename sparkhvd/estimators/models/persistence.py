"""Estimators and models as folders in Spark ML's format, so that they can be saved inside Pipelines.

==========================  =================================================================================
``metadata/part-00000``     one line of JSON as Spark ML writes it: class, uid, versions, parameters
``objects.pkl``             the parameters that JSON does not know, in one cloudpickle
``trained.json``            of a model: columns, outputs, history
``model/``                  of a model: the framework's own files, which open without Spark
==========================  =================================================================================

The metadata is written last: a folder without it is no saved object (see ``saved_folder``). Loading runs the code that
was saved with it: open only what you trust. Of a Store are written its URL, its other paths and ``save_runs``; its
options (credentials among them) never are. Of the ranks' environment (``backend_env``) the names are written, never the
values.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import cloudpickle
from pyspark.ml.util import MLReader, MLWriter

from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.spark.settings import in_default_file_system, told_by_spark
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.errors import ParamError, SparkHvdError, StoreError
from sparkhvd.estimators.models import saved_folder
from sparkhvd.estimators.models.outputs import OutputSpec
from sparkhvd.estimators.models.retained_files import RetainedFiles, is_pipeline_part
from sparkhvd.estimators.models.trained import ModelArtifacts
from sparkhvd.estimators.params.backend import SparkBackend
from sparkhvd.estimators.params.declarations import Declarations
from sparkhvd.estimators.training.history import record_from_json
from sparkhvd.estimators.training.job_files import StoredFile
from sparkhvd.store import Store, store_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.estimators.api.estimator import DistributedEstimator
    from sparkhvd.estimators.models.model import TrainedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OBJECTS, _TRAINED, _MODEL = "objects.pkl", "trained.json", "model"


class FolderWriter(MLWriter):
    """Writes an object into a new folder.

    Args:
        write: writes the files, given the Store of the folder's parent, the folder's name and Spark's version, and
            returns the metadata.
    """

    def __init__(self, write: Callable[[Store, str, str], saved_folder.Metadata]) -> None:
        super().__init__()
        self._write = write
        self._store: Store | None = None

    def within(self, store: Store | str) -> Self:
        """Write into a Store, with what it knows of access: ``save`` then takes a path in it."""
        self._store = store_at("store", store)
        return self

    def save(self, path: str) -> None:
        """Write to ``path``: a URL, or a path in Spark's default file system; reached by what Spark knows of access.

        Raises:
            StoreError: there is something already, and ``overwrite()`` was not called.
        """
        store, name = _place(path, self.sparkSession, self._store)
        version = self.sparkSession.version

        def write(store: Store, folder: str) -> saved_folder.Metadata:
            return self._write(store, folder, version)

        if not store.list(name):
            saved_folder.write_new(store, name, write)
            return
        if not self.shouldOverwrite:
            raise StoreError(f"{path} exists already. Choose another path, or write().overwrite().save(path).")
        saved_folder.overwrite(store, name, write)


class FolderReader(MLReader[Any]):
    """Reads what ``FolderWriter`` wrote.

    Args:
        read: what does it, given the Store of the folder's parent and the folder's name.
    """

    def __init__(self, read: Callable[[Store, str], Any]) -> None:
        super().__init__()
        self._read = read
        self._store: Store | None = None

    def within(self, store: Store | str) -> Self:
        """Read from a Store, with what it knows of access: ``load`` then takes a path in it."""
        self._store = store_at("store", store)
        return self

    def load(self, path: str) -> Any:
        """The object at ``path``.

        Raises:
            StoreError: there is none.
            ParamError: it is of another class, or of a later format.
        """
        return self._read(*_place(path, self.sparkSession, self._store))


def write_estimator(
    estimator: DistributedEstimator, store: Store, folder: str, spark_version: str
) -> saved_folder.Metadata:
    """Write an estimator and all its parameters but secrets, see above; returns the metadata."""
    given = {param.name: value for param, value in estimator._paramMap.items()}  # noqa: SLF001  (pyspark's own way)
    own_store = given.pop("store", None)
    names = set(given.pop("backend_env", ()))
    if isinstance(backend := given.get("backend"), SparkBackend):
        names |= set(backend.env)
        given["backend"] = backend.without_env()
    plain = _write_objects(given, store, folder, estimator._pickled)  # noqa: SLF001
    extra = {
        "store": None if own_store is None else own_store.url,
        "store_settings": {} if own_store is None else _settings_of(own_store),
        "environment": sorted(names),
    }
    return _metadata(estimator, spark_version, plain, extra)


def read_estimator(kind: type[DistributedEstimator], store: Store, folder: str) -> Any:
    """The estimator of ``write_estimator``. Its Store is opened anew by its URL; set it where that needs options."""
    metadata, objects = saved_folder.read(
        store, folder, kind.__name__, lambda metadata, content: (metadata, _read_objects(store, content))
    )
    estimator = kind(**metadata["paramMap"], **objects)
    extra = metadata["sparkhvd"]
    if (url := extra["store"]) is not None:
        estimator.setParams(store=Store.create(url, **extra.get("store_settings", {})))
    if names := extra.get("environment"):
        logger.warning(
            "%s/%s was saved without the values of the ranks' environment; give %s again with setBackendEnv.",
            store.url,
            folder,
            ", ".join(names),
        )
    estimator._resetUid(metadata["uid"])  # noqa: SLF001  (pyspark's own way)
    return estimator


def _settings_of(store: Store) -> dict[str, Any]:
    """What ``Store.create`` takes besides the URL and holds no secret."""
    paths = {name: getattr(store, name, None) for name in ("train_path", "val_path", "test_path", "runs_path")}
    kept: dict[str, Any] = {name: path for name, path in paths.items() if path is not None}
    return kept if store.save_runs else {**kept, "save_runs": False}


def write_model(model: TrainedModel, store: Store, folder: str, spark_version: str) -> saved_folder.Metadata:
    """Write a model; its files are copied piece by piece, whatever their size. Returns the metadata."""
    trained = model.trained
    digests = {}
    for source in trained.files:
        name = source.path.rpartition("/")[2]
        with store.open(f"{folder}/{_MODEL}/{name}", "wb") as target:
            source.copy_to(target, model.retained_files or trained.store)
        digests[name] = source.sha256
    content = {
        "files": digests,
        "schema": [asdict(column) for column in trained.schema.columns],
        "outputs": [asdict(output) for output in trained.outputs],
        "history": [record.to_json() for record in trained.history],
    }
    store.publish(f"{folder}/{_TRAINED}", json.dumps(content).encode())
    given = {param.name: value for param, value in model._paramMap.items()}  # noqa: SLF001
    plain = _write_objects(given, store, folder)
    return _metadata(model, spark_version, plain, {})


def read_model(kind: type[TrainedModel], store: Store, folder: str) -> Any:
    """The model of ``write_model``; its files stay where they are and are read by its users."""
    return saved_folder.read(store, folder, kind.__name__, partial(_read_model, kind, store))


def _read_model(kind: type[TrainedModel], store: Store, metadata: dict[str, Any], folder: str) -> Any:
    with store.open(f"{folder}/{_TRAINED}", "rb") as file:
        content = json.loads(file.read())
    trained = ModelArtifacts(
        store=store,
        files=tuple(StoredFile(f"{folder}/{_MODEL}/{name}", digest) for name, digest in content["files"].items()),
        schema=DataSchema(tuple(_from_json(ColumnSpec, column) for column in content["schema"])),
        outputs=tuple(_from_json(OutputSpec, output) for output in content["outputs"]),
        history=tuple(record_from_json(record) for record in content["history"]),
    )
    model = kind(trained, **metadata["paramMap"], **_read_objects(store, folder))
    model._resetUid(metadata["uid"])  # noqa: SLF001
    if is_pipeline_part(f"{store.url}/{folder}") or saved_folder.is_transient(folder):
        model.retained_files = RetainedFiles(store, trained.files)
    return model


def _write_objects(
    given: Mapping[str, Any], store: Store, folder: str, pickle: Callable[[dict[str, Any]], bytes] = dumps
) -> dict[str, Any]:
    """Write the parameters that JSON does not know; the others."""
    plain = {name: value for name, value in given.items() if _is_json(value)}
    objects = {name: value for name, value in given.items() if name not in plain}
    try:
        content = pickle(objects)
    except SparkHvdError:
        raise
    except Exception as error:
        raise ParamError(f"The parameters {sorted(objects)} cannot be pickled to be saved: {error}") from error
    store.publish(f"{folder}/{_OBJECTS}", content)
    return plain


def _read_objects(store: Store, folder: str) -> dict[str, Any]:
    with store.open(f"{folder}/{_OBJECTS}", "rb") as file:
        objects: dict[str, Any] = cloudpickle.loads(file.read())
    return objects


def _place(path: str, spark: SparkSession, given: Store | None) -> tuple[Store, str]:
    """The Store of the folder that holds ``path``, and the last part of the path; or the one that was given."""
    url = path.rstrip("/")
    if given is not None:
        if "://" in url:
            raise ParamError(f"within({given.url}) needs a path in that Store; {path} is a URL.")
        return told_by_spark(given, spark), url
    if "://" not in url and not url.startswith(("file:", "dbfs:")):
        url = in_default_file_system(spark, url)
    parent, _, name = url.rpartition("/")
    return told_by_spark(Store.create(parent or ("/" if url.startswith("/") else ".")), spark), name


def _metadata(
    instance: Declarations, spark_version: str, plain: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "class": f"{type(instance).__module__}.{type(instance).__name__}",
        "timestamp": time.time_ns() // 1_000_000,
        "sparkVersion": spark_version,
        "uid": instance.uid,
        "paramMap": dict(plain),
        "defaultParamMap": {},  # the defaults are those of the class that reads this
        "sparkhvd": dict(extra),
    }


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _from_json(kind: type[T], content: Mapping[str, Any]) -> T:
    """A frozen dataclass from what ``asdict`` and JSON made of it: lists were tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})
