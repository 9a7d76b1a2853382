"""Existing files on this machine or a mount."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from sparkhvd.errors import StoreError
from sparkhvd.store.access.disk import ask_disk, open_to_read
from sparkhvd.store.backends.local import absolute_path, files_below
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyarrow import fs


@dataclass(frozen=True)
class ReadOnlyFolder(Store):
    """A read-only folder on this machine or a mount; a missing folder is not created."""

    root: str

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def exists(self, path: str) -> bool:
        return ask_disk("look up", f"{self.url}/{path}", Path(self.root, path).exists)

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        if mode != "rb":
            raise self._refused()
        return open_to_read(Path(self.root, path), f"{self.url}/{path}")

    def list(self, path: str) -> list[str]:
        """List all files below ``path``, or the file itself, sorted."""
        top = Path(self.root, path)

        def list_files() -> list[str]:
            if top.is_file():
                return [path]
            return sorted(file.relative_to(self.root).as_posix() for file in files_below(top))

        return ask_disk("list", f"{self.url}/{path}", list_files)

    def publish(self, path: str, content: bytes) -> None:  # noqa: ARG002
        raise self._refused()

    def delete(self, path: str) -> None:  # noqa: ARG002
        raise self._refused()

    def spark_url(self, path: str) -> str:
        return f"{self.url}/{path}"

    def spark_options(self) -> dict[str, str]:
        return {}

    def with_spark_settings(self, settings: Mapping[str, str]) -> ReadOnlyFolder:  # noqa: ARG002
        return self

    def at(self, url: str) -> ReadOnlyFolder:
        return ReadOnlyFolder(absolute_path(url))

    @property
    def train_path(self) -> str | None:
        return None

    @property
    def val_path(self) -> str | None:
        return None

    @property
    def test_path(self) -> str | None:
        return None

    @property
    def save_runs(self) -> bool:
        return False

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        from pyarrow import fs  # noqa: PLC0415  (heavy)

        return fs.LocalFileSystem(use_mmap=True), str(Path(self.root, path))

    def _refused(self) -> StoreError:
        return StoreError(f"The files in {self.url} are read-only; sparkhvd never writes there.")
