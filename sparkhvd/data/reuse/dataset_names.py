"""Users' names for prepared rows, by which later jobs find them."""

from __future__ import annotations

from collections.abc import Iterator

from sparkhvd.data.reuse.fingerprint import Fingerprint
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import Manifest
from sparkhvd.data.schema.selection import Selection
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store


def notes_of(store: Store, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path of every note of the name and the id of its dataset, the newest first."""
    for note in reversed(store.list(layout.name_folder(name))):
        yield note, note.rpartition("/")[2]


def id_of(store: Store, name: str) -> str:
    """Return the id of the dataset with this name; without one, the name itself, which may be an id."""
    existing = (dataset_id for _, dataset_id in notes_of(store, name) if store.exists(layout.manifest_path(dataset_id)))
    return next(existing, name)


def difference(manifest: Manifest, selection: Selection, seed: int, known: Fingerprint | None) -> str | None:
    """Describe how the rows of a name differ from the requested ones; None if no difference is known.

    Args:
        manifest: the manifest of the rows that have the name.
        selection: the requested columns and split.
        seed: the seed of a split by fraction.
        known: the fingerprint of the DataFrame, if it has one.
    """
    if _shown(selection.schema) != _shown(manifest.schema):
        return "their columns, types or fills"
    by_fraction = isinstance(selection.validation, float)
    if selection.validation != manifest.validated_by or (by_fraction and seed != manifest.seed):
        return "their validation splits"
    # A cache cannot be identified in another application.
    if known is not None and not known.caches and manifest.fingerprint not in {None, known.text}:
        return "the DataFrame, its files or the settings of spark.sql"
    return None


def measures(manifest: Manifest) -> tuple[object, ...]:
    """Return the facts about prepared rows that are equal for equal rows."""
    held_out = None if manifest.validation is None else manifest.validation.rows
    return manifest.train.rows, held_out, manifest.schema, manifest.labels


def _shown(schema: DataSchema) -> list[tuple[object, ...]]:
    """Return the properties of the columns that are known both before and after their preparation."""
    return [(one.name, one.dtype, one.role, one.kind, one.depth, one.fill, one.sparse) for one in schema.columns]
