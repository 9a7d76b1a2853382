"""The protocol of a Store: bytes under a URL, without knowledge of Parquet, models or runs (see ``layout``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, runtime_checkable

from sparkhvd.errors import StoreError
from sparkhvd.store.registry import create

if TYPE_CHECKING:
    from pyarrow import fs


@runtime_checkable
class Store(Protocol):
    """A folder that the driver and every rank can reach. Paths are relative to ``url`` and use ``/`` as the separator.

    A Store is a small picklable value: it crosses process boundaries and opens connections where it is used. All
    methods raise a ``StoreError`` that names the full URL. They refuse a path with ``..`` or a leading ``/``.
    """

    @staticmethod
    def create(url: str, **options: object) -> Store:
        """Return the Store at a URL, an instance of the class for its scheme.

        Args:
            url: a URL such as ``file:///data/store``, or a path. The driver, the executors and the ranks must reach
                the same files through it.
            options: further arguments of that class.

        Raises:
            StoreError: the URL is not a string, no class serves the scheme, or the folder cannot be used.

        Examples:
            >>> store = Store.create("/mnt/shared/experiments")
        """
        store = create(url, **options)
        if not isinstance(store, Store):
            raise StoreError(f"{type(store).__name__}, which serves {url!r}, is not a Store.")
        return store

    @property
    def url(self) -> str:
        """Return the URL of the Store, such as ``file:///data/store``."""

    @property
    def train_path(self) -> str | None:
        """Return the URL of existing rows to train on; None if it was not set."""

    @property
    def val_path(self) -> str | None:
        """Return the URL of existing rows to validate on; None if it was not set."""

    @property
    def test_path(self) -> str | None:
        """Return the URL of existing rows to test on; None if it was not set."""

    @property
    def save_runs(self) -> bool:
        """Return whether checkpoints of runs are kept here."""

    def exists(self, path: str) -> bool: ...
    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        """Open a file to read, or a new one that becomes visible as a whole on ``close``, and never after an error."""

    def list(self, path: str) -> list[str]:
        """Return the sorted paths, relative to the Store, of all files below ``path``; a file is below itself."""

    def publish(self, path: str, content: bytes) -> None:
        """Write one small object atomically; raise ``StoreError`` if ``path`` exists, even in a race."""

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its content; a missing path is not an error."""

    def spark_url(self, path: str) -> str | None:
        """Return the URL of ``path`` for Spark's readers and writers; None if Hadoop lacks the scheme."""

    def spark_options(self) -> dict[str, str]:
        """Return options for Spark's readers and writers with the access settings of this Store."""

    def with_spark_settings(self, settings: Mapping[str, str]) -> Store:
        """Return this Store with missing options filled in from Hadoop's settings (``fs.s3a.access.key``...)."""

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        """Return an Arrow file system and the path in it, for fast reads (memory-mapped for local files)."""

    def at(self, url: str) -> Store:
        """Return the Store at another URL of the same file system, with the same access."""
