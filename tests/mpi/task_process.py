"""A process in place of a Spark task; it imports only what a task needs."""

from __future__ import annotations

import pickle
import sys

from sparkhvd.task.mpi.task import serve
from sparkhvd.task.result_rows import result_rows


def main() -> None:
    job, place = pickle.loads(sys.stdin.buffer.read())
    contents = serve(job, place)
    rows = [
        row for rank, content in contents.items() for batch in result_rows(rank, content) for row in batch.to_pylist()
    ]
    sys.stdout.buffer.write(pickle.dumps(rows))


if __name__ == "__main__":
    main()
