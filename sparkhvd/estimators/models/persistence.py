"""Save estimators and models as folders in Spark ML's format, also inside Pipelines, and load them again.

==========================  =================================================================================
``metadata/part-00000``     one line of JSON as Spark ML writes it: class, uid, versions, parameters
``objects.pkl``             the parameters that JSON cannot represent, in one cloudpickle
``trained.json``            models only: columns, outputs, history
``model/``                  models only: the framework's own files, which open without Spark
==========================  =================================================================================

The metadata is written last: a folder without it is not a saved object (see ``saved_folder``). Loading runs the code
that was saved with the object: load only trusted objects. A Store is saved as its URL, its other paths and
``save_runs``; its options, which may hold credentials, are never saved. The ranks' environment (``backend_env``) is
saved as names without values.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import cloudpickle
from pyspark.ml.util import MLReadable, MLReader, MLWriter

from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.spark.settings import in_default_file_system, with_spark_credentials
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.errors import ParamError, SparkHvdError, StoreError
from sparkhvd.estimators.models import saved_folder
from sparkhvd.estimators.models.outputs import OutputSpec
from sparkhvd.estimators.models.retained_files import RetainedFiles, is_pipeline_part
from sparkhvd.estimators.models.saved_folder import Metadata
from sparkhvd.estimators.models.trained import ModelArtifacts
from sparkhvd.estimators.params.backend import SparkBackend
from sparkhvd.estimators.training.job_files import FileSource, StoredFile
from sparkhvd.estimators.training.logs.history import record_from_json
from sparkhvd.store import Store, store_at

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=MLReadable[Any])
E = TypeVar("E", bound="PersistableEstimator")
M = TypeVar("M", bound="PersistableModel")

_OBJECTS, _TRAINED, _MODEL = "objects.pkl", "trained.json", "model"


class Persistable(Protocol):
    """The members of an object that saving and loading use; pyspark's ``Params`` has them."""

    uid: str
    _paramMap: ParamMap  # noqa: N815  (pyspark's name)

    def __init__(self, **values: object) -> None: ...
    def setParams(self, **values: object) -> object: ...  # noqa: N802  (pyspark's name)
    def _resetUid(self, newUid: str) -> object: ...  # noqa: N802, N803


class PersistableEstimator(Persistable, Protocol):
    """The members of an estimator that this module uses."""

    def _pickled(self, objects: dict[str, object]) -> bytes: ...


class PersistableModel(Persistable, Protocol):
    """The members of a trained model that this module uses."""

    retained_files: RetainedFiles | None

    @classmethod
    def of_artifacts(cls, trained: ModelArtifacts, **params: Any) -> Self: ...
    @property
    def trained(self) -> ModelArtifacts: ...
    @property
    def file_source(self) -> FileSource: ...


class FolderWriter(MLWriter):
    """Writes an object into a new folder.

    Args:
        write: takes a Store, the folder's path in it and Spark's version, writes the files and returns the metadata.
    """

    def __init__(self, write: Callable[[Store, str, str], Metadata]) -> None:
        super().__init__()
        self._write = write
        self._store: Store | None = None

    def within(self, store: Store | str) -> Self:
        """Write into a Store, with its access options; ``save`` then takes a path in this Store."""
        self._store = store_at("store", store)
        return self

    def save(self, path: str) -> None:
        """Write to ``path``, a URL or a path in Spark's default file system, with Spark's access settings.

        Raises:
            StoreError: the path already exists, and ``overwrite()`` was not called.
        """
        store, name = _locate(path, self.sparkSession, self._store)
        version = self.sparkSession.version

        def write(store: Store, folder: str) -> Metadata:
            return self._write(store, folder, version)

        if self.shouldOverwrite:
            saved_folder.overwrite(store, name, write)
            return
        if saved_folder.files(store, name):
            raise StoreError(f"{path} already exists. Choose another path, or write().overwrite().save(path).")
        saved_folder.write_new(store, name, write)


class FolderReader(MLReader[R]):
    """Reads an object that ``FolderWriter`` wrote.

    Args:
        read: takes a Store and the folder's path in it, and returns the object.
    """

    def __init__(self, read: Callable[[Store, str], R]) -> None:
        super().__init__()
        self._read = read
        self._store: Store | None = None

    def within(self, store: Store | str) -> Self:
        """Read from a Store, with its access options; ``load`` then takes a path in this Store."""
        self._store = store_at("store", store)
        return self

    def load(self, path: str) -> R:
        """Return the object at ``path``.

        Raises:
            StoreError: there is no saved object.
            ParamError: the object has another class or a later format.
        """
        return self._read(*_locate(path, self.sparkSession, self._store))


def write_estimator(estimator: PersistableEstimator, store: Store, folder: str, spark_version: str) -> Metadata:
    """Write an estimator with all its parameters except secrets (see the top of this file) and return the metadata."""
    params = {param.name: value for param, value in estimator._paramMap.items()}  # noqa: SLF001  (pyspark's own way)
    own_store = params.pop("store", None)
    env_names = set(params.pop("backend_env", ()))
    if isinstance(backend := params.get("backend"), SparkBackend):
        env_names |= set(backend.env)
        params["backend"] = backend.without_env()
    plain = _write_objects(params, store, folder, estimator._pickled)  # noqa: SLF001
    extra = {
        "store": None if own_store is None else own_store.url,
        "store_settings": {} if own_store is None else _store_settings(own_store),
        "environment": sorted(env_names),
    }
    return _metadata(estimator, spark_version, plain, extra)


def read_estimator(estimator_class: type[E], store: Store, folder: str) -> E:
    """Return the estimator that ``write_estimator`` wrote.

    Its Store is created again from its URL and paths; options such as credentials must be set again.
    """
    metadata, objects = saved_folder.read(
        store, folder, estimator_class.__name__, lambda metadata, content: (metadata, _read_objects(store, content))
    )
    estimator = estimator_class(**metadata["paramMap"], **objects)
    extra = metadata["sparkhvd"]
    if (url := extra["store"]) is not None:
        estimator.setParams(store=Store.create(url, **extra.get("store_settings", {})))
    if env_names := extra.get("environment"):
        logger.warning(
            "%s/%s was saved without the values of the ranks' environment; set %s again with setBackendEnv.",
            store.url,
            folder,
            ", ".join(env_names),
        )
    estimator._resetUid(metadata["uid"])  # noqa: SLF001  (pyspark's own way)
    return estimator


def _store_settings(store: Store) -> dict[str, object]:
    """Return the arguments of ``Store.create`` that hold no secret, without the URL."""
    paths = {name: getattr(store, name, None) for name in ("train_path", "val_path", "test_path", "runs_path")}
    kept: dict[str, object] = {name: path for name, path in paths.items() if path is not None}
    return kept if store.save_runs else {**kept, "save_runs": False}


def write_model(model: PersistableModel, store: Store, folder: str, spark_version: str) -> Metadata:
    """Write a model and return the metadata; files are copied in chunks, because they may be larger than the memory."""
    trained = model.trained
    digests = {}
    for source in trained.files:
        name = source.path.rpartition("/")[2]
        with store.open(f"{folder}/{_MODEL}/{name}", "wb") as target:
            source.copy_to(target, model.file_source)
        digests[name] = source.sha256
    content = {
        "files": digests,
        "schema": [asdict(column) for column in trained.schema.columns],
        "outputs": [asdict(output) for output in trained.outputs],
        "history": [record.to_json() for record in trained.history],
    }
    store.publish(f"{folder}/{_TRAINED}", json.dumps(content).encode())
    params = {param.name: value for param, value in model._paramMap.items()}  # noqa: SLF001
    plain = _write_objects(params, store, folder)
    return _metadata(model, spark_version, plain, {})


def read_model(model_class: type[M], store: Store, folder: str) -> M:
    """Return the model that ``write_model`` wrote.

    The model's files stay in place and are read when the model is used. Files that a later write may remove, such as
    the files of a Pipeline's stage, are retained immediately (see ``RetainedFiles``).
    """
    return saved_folder.read(store, folder, model_class.__name__, partial(_read_model, model_class, store))


def _read_model(model_class: type[M], store: Store, metadata: Metadata, folder: str) -> M:
    with store.open(f"{folder}/{_TRAINED}", "rb") as file:
        content = json.loads(file.read())
    trained = ModelArtifacts(
        store=store,
        files=tuple(StoredFile(f"{folder}/{_MODEL}/{name}", digest) for name, digest in content["files"].items()),
        schema=DataSchema(tuple(_from_json(ColumnSpec, column) for column in content["schema"])),
        outputs=tuple(_from_json(OutputSpec, output) for output in content["outputs"]),
        history=tuple(record_from_json(record) for record in content["history"]),
    )
    model = model_class.of_artifacts(trained, **metadata["paramMap"], **_read_objects(store, folder))
    model._resetUid(metadata["uid"])  # noqa: SLF001
    if is_pipeline_part(f"{store.url}/{folder}") or saved_folder.is_transient(folder):
        model.retained_files = RetainedFiles(store, trained.files)
    return model


def _write_objects(
    params: Mapping[str, object], store: Store, folder: str, pickle: Callable[[dict[str, object]], bytes] = dumps
) -> dict[str, object]:
    """Pickle the parameters that JSON cannot represent into the folder, and return the others."""
    plain = {name: value for name, value in params.items() if _is_json(value)}
    objects = {name: value for name, value in params.items() if name not in plain}
    try:
        content = pickle(objects)
    except SparkHvdError:
        raise
    except Exception as error:
        raise ParamError(
            f"The parameters {sorted(objects)} cannot be saved because they cannot be pickled: {error}"
        ) from error
    store.publish(f"{folder}/{_OBJECTS}", content)
    return plain


def _read_objects(store: Store, folder: str) -> dict[str, object]:
    with store.open(f"{folder}/{_OBJECTS}", "rb") as file:
        objects: dict[str, object] = cloudpickle.loads(file.read())
    return objects


def _locate(path: str, spark: SparkSession, within: Store | None) -> tuple[Store, str]:
    """Return a Store and the path in it: ``within`` if it is set, else the Store of the parent folder of ``path``."""
    url = path.rstrip("/")
    if within is not None:
        if "://" in url:
            raise ParamError(f"within({within.url}) needs a path in that Store, but {path} is a URL. Pass a path.")
        return with_spark_credentials(within, spark), url
    if "://" not in url and not url.startswith(("file:", "dbfs:")):
        url = in_default_file_system(spark, url)
    parent, _, name = url.rpartition("/")
    return with_spark_credentials(Store.create(parent or ("/" if url.startswith("/") else ".")), spark), name


def _metadata(
    instance: Persistable, spark_version: str, plain: Mapping[str, object], extra: Mapping[str, object]
) -> Metadata:
    return {
        "class": f"{type(instance).__module__}.{type(instance).__name__}",
        "timestamp": time.time_ns() // 1_000_000,
        "sparkVersion": spark_version,
        "uid": instance.uid,
        "paramMap": dict(plain),
        "defaultParamMap": {},  # the class declares its defaults itself
        "sparkhvd": dict(extra),
    }


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _from_json(dataclass_type: type[T], content: Mapping[str, Any]) -> T:
    """Return a dataclass from its ``asdict`` content, with the tuples that JSON turned into lists."""
    return dataclass_type(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    )
