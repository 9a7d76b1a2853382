"""The files of a communicator's timeline, and the merging of several hosts' files.

A recording is a Chrome trace: open it in Perfetto (https://ui.perfetto.dev) or at chrome://tracing. The ranks of one
host share one file; the files of several hosts can be opened together or merged by ``merge_timelines``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sparkhvd.errors import ConfigError


def timeline_path(path: str, host_ranks: Sequence[int]) -> str:
    """Return the file of one host's ranks: ``path`` on rank 0's host, elsewhere with the host's first rank in its name.

    Each host has its own file because appends from several hosts could mix in a shared folder.
    """
    first = min(host_ranks)
    target = Path(path)
    return str(target if first == 0 else target.with_name(f"{target.stem}.rank-{first}{target.suffix}"))


def recording_name(token: bytes, scope: str, number: int) -> str:
    """Return a name that is unique among jobs and equal on all ranks of one; it does not reveal ``token``."""
    job = hmac.digest(token, b"timeline", hashlib.sha256).hex()[:16] if token else uuid.uuid4().hex
    return f"{job}/{scope}/{number}"


def merge_timelines(paths: Iterable[str | Path], target: str | Path) -> None:
    """Write one trace with the events of several recordings, such as those of the hosts of a job.

    Args:
        paths: recordings, including those of a killed job.
        target: the file to write.

    Raises:
        ConfigError: a file is not a recording.
    """
    with Path(target).open("w", encoding="utf-8") as merged:
        merged.write("[")
        separator = "\n"
        for path in paths:
            for event in read_timeline(path):
                merged.write(separator + json.dumps(event))
                separator = ",\n"
        merged.write("\n]\n")


def read_timeline(path: str | Path) -> Iterator[dict[str, object]]:
    """Return the events of a recording; a line that a killed rank could not finish is skipped."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        if next(lines, "").strip() != "[":
            raise ConfigError(
                f"{path} is not a timeline: its first line is not an opening bracket. Pass files that "
                "sparkhvd recorded."
            )
        for line in lines:
            try:
                event = json.loads(line.strip().removesuffix(","))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
