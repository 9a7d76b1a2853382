"""The rows through which a task returns a result or a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from sparkhvd.task.job import CHUNK_BYTES, FAILURE, RESULT
from sparkhvd.task.supervision import Outcome


def result_rows(rank: int, content: bytes | Outcome) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``RESULT_SCHEMA`` for a rank: its result in chunks, or its failure if that ended the job."""
    if isinstance(content, bytes):
        for chunk, start in enumerate(range(0, max(len(content), 1), CHUNK_BYTES)):
            yield row(rank, RESULT, chunk, content[start : start + CHUNK_BYTES])
    elif content.failure is not None and content.failure.rank == rank:
        yield row(rank, FAILURE, 0, content.failure.to_json())


def row(rank: int, kind: str, chunk: int, content: bytes) -> pa.RecordBatch:
    """Return one row of ``RESULT_SCHEMA``."""
    return pa.RecordBatch.from_pydict(
        {
            "rank": pa.array([rank], pa.int32()),
            "kind": pa.array([kind], pa.string()),
            "chunk": pa.array([chunk], pa.int32()),
            "content": pa.array([content], pa.binary()),
        }
    )
