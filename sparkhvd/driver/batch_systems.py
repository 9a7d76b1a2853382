"""The hosts that Slurm and LSF assign to a batch job."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.driver.hosts import Host
from sparkhvd.errors import ConfigError

# "name", or "name[01-03,7]"; a comma outside of brackets ends an entry.
_SLURM_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_SLURM_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_SLURM_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a batch job.

    Attributes:
        job: the name of the job in messages, such as ``Slurm job 17``.
        hosts: the hosts; each has as many slots as it has tasks of the job.
        slurm_id: the id of a Slurm job, with which ``srun`` reaches its hosts; None for LSF.
    """

    job: str
    hosts: tuple[Host, ...]
    slurm_id: str | None = None


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the hosts of the batch job that set this environment; None outside a batch job.

    Slurm describes them in ``SLURM_JOB_NODELIST`` and ``SLURM_TASKS_PER_NODE``, LSF in the file ``LSB_DJOB_RANKFILE``,
    in ``LSB_MCPU_HOSTS`` or in ``LSB_HOSTS``.

    Raises:
        ConfigError: a variable has an unknown form, or the file cannot be read.
    """
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        job_id = environment.get("SLURM_JOB_ID")
        return Allocation(f"Slurm job {job_id}", _slurm_hosts(nodes, environment.get("SLURM_TASKS_PER_NODE")), job_id)
    if environment.get("LSB_JOBID"):
        hosts = _lsf_hosts(environment)
        return Allocation(f"LSF job {environment['LSB_JOBID']}", hosts) if hosts else None
    return None


def _slurm_hosts(nodes: str, tasks: str | None) -> tuple[Host, ...]:
    if _SLURM_ENTRY.sub("", nodes).strip(","):
        raise _malformed("SLURM_JOB_NODELIST", nodes, "its brackets do not match")
    names = [name for entry in _SLURM_ENTRY.findall(nodes) for name in _slurm_names(entry, nodes)]
    counts = [1] * len(names) if tasks is None else list(_slurm_counts(tasks))
    if len(counts) != len(names):
        raise _malformed("SLURM_TASKS_PER_NODE", str(tasks), f"it has {len(counts)} entries for {len(names)} nodes")
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True) if count)


def _slurm_names(entry: str, nodes: str) -> Iterator[str]:
    parts = [
        [text] if ranges is None else list(_slurm_numbers(ranges, nodes))
        for ranges, text in ((part[1], part[2]) for part in _SLURM_PART.finditer(entry))
    ]
    for combination in itertools.product(*parts):
        yield "".join(combination)


def _slurm_numbers(ranges: str, nodes: str) -> Iterator[str]:
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise _malformed("SLURM_JOB_NODELIST", nodes, f"{item!r} is not a range of numbers")
        if int(first) > int(last or first):
            raise _malformed("SLURM_JOB_NODELIST", nodes, f"{item!r} ends before it begins")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _slurm_counts(tasks: str) -> Iterator[int]:
    for item in tasks.split(","):
        match = _SLURM_COUNT.fullmatch(item.strip())
        if match is None:
            raise _malformed("SLURM_TASKS_PER_NODE", tasks, f"{item!r} is not a number of tasks")
        yield from [int(match[1])] * int(match[2] or 1)


def _lsf_hosts(environment: Mapping[str, str]) -> tuple[Host, ...]:
    if path := environment.get("LSB_DJOB_RANKFILE"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                f"LSB_DJOB_RANKFILE={path} cannot be read: {error.strerror}. Name the hosts with -H host1:2,host2:2."
            ) from error
        return _hosts_of_slots([line.split()[0] for line in lines if line.split()])
    if words := environment.get("LSB_MCPU_HOSTS", "").split():
        names, counts = words[::2], words[1::2]
        if len(names) != len(counts) or not all(count.isdecimal() for count in counts):
            raise _malformed("LSB_MCPU_HOSTS", " ".join(words), "it must consist of pairs of a host and its slots")
        return _hosts_of_slots([name for name, count in zip(names, counts, strict=True) for _ in range(int(count))])
    return _hosts_of_slots(environment.get("LSB_HOSTS", "").split())


def _hosts_of_slots(names: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a list with one name per slot, in the order in which they first appear."""
    return tuple(Host(name, count) for name, count in Counter(names).items())


def _malformed(name: str, value: str, problem: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} has an unknown form: {problem}. Name the hosts with -H host1:2,host2:2.")
