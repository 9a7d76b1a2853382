"""The launch context for a program that a rank starts, so that ``hvd.init()`` works in ``sparkhvdrun python train.py``.

The context is in the memory of the rank's worker process. The environment names it by a path below ``/proc`` that
only the same user can open and that vanishes with the worker, so the job's secret is in no file and no environment.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sparkhvd.comm.connect.commit_folder import CommitFolder
from sparkhvd.comm.connect.launch_context import LaunchContext, MembershipAddress
from sparkhvd.config import Config, inherited_context_path, setting_variables
from sparkhvd.errors import LaunchError
from sparkhvd.world import World


@dataclasses.dataclass(frozen=True)
class InheritedWorld:
    """The data that a program inherits from the rank that started it.

    Attributes:
        context: the launch context of the rank.
        variables: the variables of settings in the rank's environment.
        commits: where an elastic job publishes commits; None if it keeps them in memory only.
    """

    context: LaunchContext
    variables: dict[str, str]
    commits: CommitFolder | None = None


@contextmanager
def memory_file(content: bytes) -> Iterator[str]:
    """Provide, within this block, the path under which processes of the same user on this host find ``content``.

    Use it to pass secrets to child processes. An environment variable would be inherited and readable while they live.
    """
    descriptor = os.memfd_create("sparkhvd-launch-context")
    try:
        os.write(descriptor, content)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def context_file(context: LaunchContext, commits: CommitFolder | None = None) -> AbstractContextManager[str]:
    """Provide, within this block, the path under which child processes find ``context`` and ``commits``.

    They also find the settings in this process's environment, so that they can detect which settings a program changes
    later.
    """
    return memory_file(to_json(InheritedWorld(context, setting_variables(), commits)))


def inherited_world() -> InheritedWorld | None:
    """Return the data of the rank that started this program; None if no rank did.

    Raises:
        LaunchError: the rank has ended.
    """
    path = inherited_context_path()
    if not path:
        return None
    try:
        return from_json(Path(path).read_bytes())
    except OSError as error:
        raise LaunchError(
            f"The rank that started this program has ended ({error}), so the program cannot join its job. "
            "Call hvd.init() while the rank runs."
        ) from error


def to_json(world: InheritedWorld) -> bytes:
    context = world.context
    fields = {**dataclasses.asdict(context), "token": context.token.hex()}
    if context.membership is not None:
        fields["membership"]["token"] = context.membership.token.hex()
    commits = None if world.commits is None else base64.b64encode(pickle.dumps(world.commits)).decode()
    return json.dumps({"context": fields, "variables": world.variables, "commits": commits}).encode()


def from_json(content: bytes) -> InheritedWorld:
    message = json.loads(content)
    fields: dict[str, Any] = message["context"]
    fields["world"] = World(**fields["world"])
    settings = fields["config"]
    fields["config"] = Config(**settings | {"thread_affinity": tuple(settings["thread_affinity"])})
    fields["rendezvous"] = _addresses(fields["rendezvous"])
    fields["members"] = tuple(fields["members"])
    fields["token"] = bytes.fromhex(fields["token"])
    if (membership := fields["membership"]) is not None:
        fields["membership"] = MembershipAddress(
            membership["worker"], _addresses(membership["addresses"]), bytes.fromhex(membership["token"])
        )
    commits = None if message["commits"] is None else pickle.loads(base64.b64decode(message["commits"]))
    return InheritedWorld(LaunchContext(**fields), message["variables"], commits)


def _addresses(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((str(host), int(port)) for host, port in pairs)
