"""A rank whose function runs a program."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from sparkhvd.comm import session
from sparkhvd.comm.connect.inherited_world import context_file
from sparkhvd.config import INHERITED_CONTEXT, changed_environment
from sparkhvd.errors import LaunchError
from sparkhvd.task.failure_report import describe_exit


class CommandEndedError(LaunchError):
    """The program of a rank failed; the message completes "Rank 1 on host X ...".

    Attributes:
        code: the program's exit code, negative if a signal ended it; None if the program could not be started.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def run_command(command: Sequence[str]) -> int:
    """Run a program whose ``hvd.init()`` joins this rank's job, and return 0 when it has succeeded.

    Raises:
        CommandEndedError: the program ended with another exit code, or could not be started.
    """
    publisher = session.publisher()
    with context_file(session.launch_context(), None if publisher is None else publisher.folder) as path:
        try:
            code = subprocess.call(list(command), env=changed_environment({INHERITED_CONTEXT: path}))
        except OSError as error:
            hint = f". Start a Python file as: python {' '.join(command)}" if _is_python_file(command[0]) else ""
            raise CommandEndedError(f"could not start {command[0]!r}: {error.strerror or error}{hint}") from error
    if code != 0:
        raise CommandEndedError(f"{describe_exit(code)}: {' '.join(command)}", code)
    return code


def _is_python_file(program: str) -> bool:
    return program.endswith(".py")
