"""What a Store is: bytes under a URL. It knows nothing about Parquet, models or runs (see ``layout``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pyarrow import fs


@runtime_checkable
class Store(Protocol):
    """A folder somewhere that the driver and every rank can reach. Paths are relative to ``url``, with ``/`` between.

    A Store is a small picklable value: it crosses process boundaries and opens connections where it is used.
    All methods raise ``StoreError`` naming the full URL; a path with ``..`` or a leading ``/`` is refused.
    """

    @staticmethod
    def create(url: str, **options: object) -> Store:
        """The Store at a URL, of the class that serves its scheme.

        Args:
            url: such as ``file:///data/store``, or a plain path. The driver, the executors and the ranks must all
                reach the same files by it.
            options: what the class of that scheme takes besides the URL.

        Raises:
            StoreError: nothing serves the scheme, or the place cannot be used.

        Example:
            >>> store = Store.create("/mnt/shared/experiments")
        """
        from sparkhvd.store.registry import create  # noqa: PLC0415  (the table imports this module)

        return create(url, **options)

    @property
    def url(self) -> str:
        """Where the Store lies, such as ``file:///data/store``."""

    @property
    def train_path(self) -> str | None:
        """Where existing rows to train on lie, as a URL for ``at``; None unless it was given."""

    @property
    def val_path(self) -> str | None:
        """The same for rows to validate on."""

    @property
    def test_path(self) -> str | None:
        """The same for rows to test on."""

    @property
    def save_runs(self) -> bool:
        """Whether checkpoints of runs are kept here."""

    def exists(self, path: str) -> bool: ...
    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        """A file for reading, or a new file whose content appears all at once on ``close`` (never when it fails)."""

    def list(self, path: str) -> list[str]:
        """Paths (relative to the Store) of all files below ``path``, sorted; a file is below itself."""

    def publish(self, path: str, content: bytes) -> None:
        """Write one small object, all or nothing; ``StoreError`` if ``path`` exists already, also in a race."""

    def delete(self, path: str) -> None:
        """Remove a file or a folder with everything in it; nothing happens where nothing is."""

    def spark_url(self, path: str) -> str | None:
        """The URL by which Spark's own readers and writers reach ``path``; None where Hadoop has no such scheme."""

    def spark_options(self) -> dict[str, str]:
        """Options for Spark's readers and writers that say what this Store was told about access."""

    def with_spark_settings(self, settings: Mapping[str, str]) -> Store:
        """This Store, told what Hadoop's settings (``fs.s3a.access.key``...) say and its own options do not."""

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        """An Arrow file system and the path in it: the fast way to read (memory-mapped for local files)."""

    def at(self, url: str) -> Store:
        """The Store at another URL of the same file system, reached in the same way."""
