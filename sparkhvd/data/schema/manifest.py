"""The manifest of a prepared dataset, one small JSON file. A dataset exists once its manifest exists."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import DataError, StoreError
from sparkhvd.store.protocol import Store

FORMAT = "sparkhvd dataset"
FORMAT_VERSION = 1

# The smallest and the largest value of each label that is a single number: (name, smallest, largest).
LabelRanges = tuple[tuple[str, float, float], ...]

SplitName = Literal["train", "validation"]


@dataclass(frozen=True)
class DataFile:
    """One Parquet file.

    Attributes:
        path: relative to the dataset's folder.
        row_groups: the number of rows of each row group.
        size: the size in bytes if other programs may replace the file; None for a prepared file, which never changes.
        digest: the digest of the footer, for a file with a size.
    """

    path: str
    row_groups: tuple[int, ...]
    size: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True)
class Split:
    """The files of one split; read one after the other, they contain the rows in the DataFrame's order."""

    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(self.block_rows())

    def block_rows(self) -> tuple[int, ...]:
        """Return the row counts of all row groups, in row order."""
        return tuple(rows for file in self.files for rows in file.row_groups)

    def blocks(self) -> list[tuple[DataFile, int]]:
        """Return the file and the index in it of every row group, in the order of ``block_rows``."""
        return [(file, index) for file in self.files for index in range(len(file.row_groups))]


@dataclass(frozen=True)
class Manifest:
    """A prepared dataset.

    Attributes:
        dataset_id: unique and never reused.
        folder: the dataset's folder, relative to the Store. It is the manifest's location, so the file does not
            contain it.
        schema: the columns, with all shapes known.
        train: the rows to train on.
        validation: the held-out rows; None if none were requested.
        seed: the seed of the split.
        validated_by: the fraction, the column or (for existing files) the path that defines the split; None without
            validation.
        fingerprint: later preparations compare it with their own; None if the rows cannot be recognized.
        labels: the smallest and the largest value of every label that is a single number, by name.
        name: the user's name for the dataset, if there is one.
    """

    dataset_id: str
    folder: str
    schema: DataSchema
    train: Split
    validation: Split | None
    seed: int
    validated_by: float | str | None
    fingerprint: str | None = None
    labels: LabelRanges = ()
    name: str | None = None

    @property
    def path(self) -> str:
        """Return the path of the manifest in the Store, as ``load`` takes it."""
        return f"{self.folder}/manifest.json"

    def split(self, name: SplitName) -> Split:
        """Return the split of this name.

        Raises:
            DataError: the dataset has no validation rows.
        """
        split = self.train if name == "train" else self.validation
        if split is None:
            raise DataError(
                f"The dataset ({self.dataset_id}) has no validation rows. Prepare it again with validation=, or read "
                "split='train'."
            )
        return split

    def to_json(self) -> bytes:
        """Return the content of the manifest's file."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dataset_id": self.dataset_id,
            "schema": [asdict(column) for column in self.schema.columns],
            "train": _split_to_json(self.train),
            "validation": None if self.validation is None else _split_to_json(self.validation),
            "seed": self.seed,
            "validated_by": self.validated_by,
            "fingerprint": self.fingerprint,
            "labels": self.labels,
            "name": self.name,
        }
        return json.dumps(content, indent=1).encode()


def load(store: Store, path: str) -> Manifest:
    """Read a manifest.

    Raises:
        StoreError: there is no such file, or it cannot be read.
        DataError: it is not a manifest, is incomplete, or has another format version.
    """
    url = f"{store.url}/{path}"
    if not store.exists(path):
        raise StoreError(
            f"There is no dataset at {url}; its preparation failed or it was deleted. Prepare the data again."
        )
    with store.open(path, "rb") as file:
        content = file.read()
    try:
        record = json.loads(content)
    except ValueError as error:
        raise DataError(f"{url} is not a complete manifest: {error}. Prepare the data again.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(f"{url} is not the manifest of a prepared dataset; check the path.")
    if record.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{url} has format version {record.get('format_version')!r}; this version of sparkhvd reads "
            f"{FORMAT_VERSION}. Prepare the data again with it."
        )
    try:
        return _from_json(record, path.rpartition("/")[0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{url} is not a complete manifest ({error!r}). Prepare the data again.") from error


def _split_to_json(split: Split) -> list[dict[str, object]]:
    return [{"path": file.path, "row_groups": list(file.row_groups)} for file in split.files]


# The JSON of a manifest is untyped until it has been read; load() reports every failure of these functions.
def _from_json(content: dict, folder: str) -> Manifest:  # type: ignore[type-arg]
    validation = content["validation"]
    return Manifest(
        dataset_id=str(content["dataset_id"]),
        folder=folder,
        schema=DataSchema(tuple(_column_from_json(column) for column in content["schema"])),
        train=_split_from_json(content["train"]),
        validation=None if validation is None else _split_from_json(validation),
        seed=int(content["seed"]),
        validated_by=content["validated_by"],
        fingerprint=content.get("fingerprint"),
        labels=tuple((str(name), low, high) for name, low, high in content.get("labels", ())),
        name=content.get("name"),
    )


def _column_from_json(content: dict) -> ColumnSpec:  # type: ignore[type-arg]
    sequences = {"shape": tuple(int(size) for size in content["shape"]), "source": tuple(content.get("source", ()))}
    return ColumnSpec(**{**content, **sequences})


def _split_from_json(content: list) -> Split:  # type: ignore[type-arg]
    return Split(
        tuple(DataFile(str(file["path"]), tuple(int(rows) for rows in file["row_groups"])) for file in content)
    )
