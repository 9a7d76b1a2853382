"""Where the recording of a communicator goes, and how recordings of several hosts become one.

A recording is a Chrome trace: open it in Perfetto (https://ui.perfetto.dev) or at chrome://tracing. The ranks of one
host write one file together; the hosts' files can be opened side by side or joined by ``merge_timelines``.
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
    """The file that the ranks of one host write: ``path`` where rank 0 is, with the host's first rank in it elsewhere.

    Hosts may share the folder through a file system over which appends of several hosts would mix.
    """
    first = min(host_ranks)
    target = Path(path)
    return str(target if first == 0 else target.with_name(f"{target.stem}.rank-{first}{target.suffix}"))


def recording_name(token: bytes, scope: str, number: int) -> str:
    """Tells apart the recordings of all jobs, and is the same on all ranks of one; says nothing of ``token``."""
    job = hmac.digest(token, b"timeline", hashlib.sha256).hex()[:16] if token else uuid.uuid4().hex
    return f"{job}/{scope}/{number}"


def merge_timelines(paths: Iterable[str | Path], target: str | Path) -> None:
    """Write one trace with the events of several, such as those of the hosts of a job.

    Args:
        paths: recordings, also those of a job that was killed.
        target: the file to write.

    Raises:
        ConfigError: a file is no recording.
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
    """The events of a recording; a line that a killed rank could not finish is left out."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        if next(lines, "").strip() != "[":
            raise ConfigError(f"{path} is not a timeline: its first line is not an opening bracket.")
        for line in lines:
            try:
                event = json.loads(line.strip().removesuffix(","))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
