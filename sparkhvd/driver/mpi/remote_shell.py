"""The remote shell of ``mpirun``: ``python -m sparkhvd.driver.mpi.remote_shell HOST orted ...``.

The program asks the driver which Spark task executes commands for the host. It lets that task execute ``orted``, waits
for ``orted`` to end, and exits with the same exit code.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sparkhvd.config import take_variables
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, SparkHvdError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.messages import Executed, ExecuteOrted, FindTask, Message, Rejected, TaskAddress

# Environment variables of mpirun that its agents inherit; the ranks do not.
DRIVER_ADDRESSES = "SPARKHVD_AGENT_DRIVER"
DRIVER_SECRET = "SPARKHVD_AGENT_SECRET"  # noqa: S105 - the name of a variable, which contains a path
DRIVER_ENCRYPTS = "SPARKHVD_AGENT_ENCRYPTS"

# The beginning of the line that an agent prints when it has lost the task that executes its orted.
LOST_TASK = "sparkhvd lost the Spark task that executes orted on"

_SECONDS = 20.0
_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Execute ``arguments[1:]`` on the host ``arguments[0]``, and return the command's exit code."""
    host, command = arguments[0], arguments[1:]
    variables = take_variables((DRIVER_ADDRESSES, DRIVER_SECRET, DRIVER_ENCRYPTS))
    try:
        addresses = [(str(name), int(port)) for name, port in json.loads(variables[DRIVER_ADDRESSES])]
        secret = Path(variables[DRIVER_SECRET]).read_bytes()
        executed = execute(host, command, addresses, secret, encrypt=bool(variables.get(DRIVER_ENCRYPTS)))
    except (SparkHvdError, OSError, KeyError) as error:
        sys.stderr.write(f"sparkhvd could not start orted on {host}: {type(error).__name__}: {error}\n")
        return _FAILED
    sys.stderr.write(executed.output.decode("utf-8", "replace"))
    return executed.returncode if executed.returncode >= 0 else 128 - executed.returncode


def execute(
    host: str, command: Sequence[str], addresses: Sequence[tuple[str, int]], secret: bytes, *, encrypt: bool = False
) -> Executed:
    """Let the task that represents ``host`` execute ``command``, and wait for the command to end.

    With ``encrypt``, connections to a driver or task that does not encrypt are refused.

    Raises:
        LaunchError: no task represents the host, or it rejected the command.
        OSError: driver or task cannot be reached.
    """
    task = _ask(partial(connect, addresses, secret, encrypt=encrypt), FindTask(host), Deadline.after(_SECONDS))
    if not isinstance(task, TaskAddress):
        raise LaunchError(f"The driver sent an unexpected answer of type {type(task).__name__}.")
    address = (task.server.address, task.server.port)
    dial = partial(connect, [address], secret, encrypt=encrypt)
    try:
        answer = _ask(dial, ExecuteOrted(tuple(command)), Deadline(math.inf))
    except OSError:
        sys.stderr.write(f"{LOST_TASK} {host}.\n")
        raise
    if not isinstance(answer, Executed):
        raise LaunchError(f"The task sent an unexpected answer of type {type(answer).__name__}.")
    return answer


def _ask(dial: Callable[[Deadline], Client], question: Message, deadline: Deadline) -> Message:
    client = dial(Deadline.after(_SECONDS))
    try:
        answer = client.ask(question, deadline)
    finally:
        client.close()
    if isinstance(answer, Rejected):
        raise LaunchError(answer.reason)
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
