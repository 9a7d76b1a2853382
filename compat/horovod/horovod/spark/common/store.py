"""The Store classes, with Horovod's methods on full paths."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from sparkhvd import store as _stores
from sparkhvd.errors import StoreError
from sparkhvd.store import layout
from sparkhvd.store.registry import backend_of, scheme_of

__all__ = ["AbstractFilesystemStore", "DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]

logger = logging.getLogger("horovod")

_DBFS_PREFIXES = ("dbfs:/", "/dbfs/", "file:///dbfs/", "file:/dbfs/")


class Store(_stores.Store):
    """See ``sparkhvd.store.Store``. Where that has paths in the Store, Horovod's methods also take full paths."""

    def __init__(self, *args: Any, checkpoint_filename: str | None = None, **options: Any) -> None:
        if checkpoint_filename is not None:
            logger.warning(
                "%s ignores checkpoint_filename=%r: checkpoints are named by epoch.",
                type(self).__name__,
                checkpoint_filename,
            )
        super().__init__(*args, **options)

    @staticmethod
    def create(prefix_path: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]  # Horovod's name
        """Return the Store at a URL or path; see ``sparkhvd.store.Store.create``."""
        backend = backend_of(scheme_of(prefix_path))
        return _CLASSES.get(backend, backend)(prefix_path, *args, **options)

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the URL of the rows to train on."""
        return self._data_path(self.train_path, "intermediate_train_data", idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the URL of the rows to validate on."""
        return self._data_path(self.val_path, "intermediate_val_data", idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the URL of the rows to test on."""
        return self._data_path(self.test_path, "intermediate_test_data", idx)

    def saving_runs(self) -> bool:
        """Return whether checkpoints of runs are kept."""
        return self.save_runs

    def get_runs_path(self) -> str:
        """Return the URL of the folder of all runs."""
        return self._url_in_store("runs")

    def get_run_path(self, run_id: str) -> str:
        """Return the URL of a run's folder."""
        return self._url_in_store(layout.run_folder(run_id))

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the URL of the folder of a run's checkpoints; None if the Store keeps none."""
        return f"{self.get_run_path(run_id)}/checkpoints" if self.save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the URLs of the run's files whose names end with ``suffix``, sorted."""
        return [self._url_in_store(path) for path in self.list(layout.run_folder(run_id)) if path.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the URL of the folder of a run's TensorBoard files; None if the Store keeps none."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self.save_runs else None

    def get_checkpoint_filename(self) -> str:
        """Return Horovod's name for the file of a callback's checkpoint."""
        return "checkpoint"

    def get_logs_subdir(self) -> str:
        """Return the name of a run's folder of TensorBoard files."""
        return "logs"

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        store, path_in_store = self._located(path)
        found: bool = super(Store, store).exists(path_in_store)  # type: ignore[safe-super]  # of the class's other base
        return found

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        store, path_in_store = self._located(path)
        with store.open(path_in_store, "rb") as file:
            return file.read()

    def write_text(self, path: str, text: str) -> None:
        """Write a file as UTF-8."""
        store, path_in_store = self._located(path)
        with store.open(path_in_store, "wb") as file:
            file.write(text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether ``get_parquet_dataset`` can read the files at a path."""
        try:
            self.get_parquet_dataset(path)
        except (OSError, StoreError, ValueError):
            return False
        return True

    def get_parquet_dataset(self, path: str) -> Any:
        """Return the ``pyarrow.parquet.ParquetDataset`` of the files at a path."""
        from pyarrow.parquet import ParquetDataset  # noqa: PLC0415  heavy

        store, path_in_store = self._located(path)
        filesystem, location = store.arrow(path_in_store)
        return ParquetDataset(location, filesystem=filesystem)

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:  # noqa: ARG002
        """Return a function that makes a temporary folder, as a context manager."""
        return _temporary_folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the content of a local folder to the run's folder."""

        def sync(local_run_path: str) -> None:
            for source in sorted(Path(local_run_path).rglob("*")):
                if source.is_file():
                    target = f"{layout.run_folder(run_id)}/{source.relative_to(local_run_path).as_posix()}"
                    with source.open("rb") as content, self.open(target, "wb") as file:
                        shutil.copyfileobj(content, file)

        return sync

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> SimpleNamespace:
        """Return the paths and functions of a run as attributes."""
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )

    def get_full_path(self, path: str) -> str:
        """Return a path as a URL; a path without a scheme is on the Store's file system."""
        if ":" in path.partition("/")[0]:
            return path
        if self.url.startswith("file:"):
            return Path(path).absolute().as_uri()
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/{path.lstrip('/')}"

    def get_localized_path(self, path: str) -> str:
        """Return a path without the scheme and the host of its URL."""
        if "://" not in path:
            return path
        _, _, rest = path.partition("://")
        return f"/{rest.partition('/')[2]}" if scheme_of(path) in {"hdfs", "viewfs"} else rest

    def _data_path(self, url: str | None, name: str, idx: int | None) -> str:
        path = self._url_in_store(name) if url is None else self.get_full_path(url)
        return path if idx is None else f"{path}.{idx}"

    def _url_in_store(self, path: str) -> str:
        return self.spark_url(path) or f"{self.url}/{path}"

    def _located(self, path: str) -> tuple[Store, str]:
        """Return a Store and the path in it for a path in this Store, a full path or a URL."""
        for url in (self.url, self.get_localized_path(self.url), self._url_in_store("x").removesuffix("/x")):
            if path.startswith(f"{url}/"):
                return self, path.removeprefix(f"{url}/").rstrip("/")
        if not path.startswith("/") and "://" not in path:
            return self, path
        folder, _, name = path.rstrip("/").rpartition("/")
        return cast("Store", self.at(folder)), name


class FilesystemStore(Store, _stores.FilesystemStore):
    """See ``sparkhvd.store.FilesystemStore``; for a local folder, a ``LocalStore``."""

    def __new__(cls, prefix_path: str | None = None, *args: Any, **options: Any) -> Any:
        """Choose the class for the path."""
        if cls is FilesystemStore and prefix_path is not None and scheme_of(prefix_path) == "file":
            return LocalStore(prefix_path, *args, **options)
        return super().__new__(cls)


class LocalStore(Store, _stores.LocalStore):
    """See ``sparkhvd.store.LocalStore``."""


class DBFSLocalStore(Store, _stores.DBFSLocalStore):
    """See ``sparkhvd.store.DBFSLocalStore``."""

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Return whether a path is on Databricks' file system."""
        return path.startswith(_DBFS_PREFIXES) and not path.startswith("dbfs://")

    @staticmethod
    def normalize_path(path: str) -> str:
        """Return a path as ``/dbfs/...``.

        Raises:
            ValueError: the path is not on Databricks' file system.
        """
        if not DBFSLocalStore.matches_dbfs(path):
            raise ValueError(f"{path!r} is not on Databricks' file system. Pass /dbfs/... or dbfs:/...")
        return f"/dbfs/{path.removeprefix(next(prefix for prefix in _DBFS_PREFIXES if path.startswith(prefix)))}"


class HDFSStore(Store, _stores.HDFSStore):
    """See ``sparkhvd.store.HDFSStore``."""

    def __init__(  # noqa: PLR0917  the order of the arguments is Horovod's
        self,
        prefix_path: str | None = None,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str | None = None,  # noqa: ARG002  sparkhvd has one client, without libhdfs
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **paths: Any,
    ) -> None:
        names = ("train_path", "val_path", "test_path", "runs_path", "save_runs", "storage_options")
        paths |= zip(names, args, strict=False)
        super().__init__(prefix_path, host, port, user, kerb_ticket, None, extra_conf, **paths)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is a URL of HDFS."""
        return path.startswith("hdfs://")


class _S3Store(Store, _stores.S3Store):
    pass


AbstractFilesystemStore = Store  # programs derive from it, or pass it to isinstance

_CLASSES: Mapping[type, type] = MappingProxyType(
    {
        _stores.DBFSLocalStore: DBFSLocalStore,
        _stores.FilesystemStore: FilesystemStore,
        _stores.HDFSStore: HDFSStore,
        _stores.LocalStore: LocalStore,
        _stores.S3Store: _S3Store,
    }
)


@contextmanager
def _temporary_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder
