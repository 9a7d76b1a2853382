"""The worker process of one rank: ``python -m sparkhvd.task.worker.main --control-fd N [module ...]``."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import logging
import os
import pickle
import queue
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import cloudpickle

from sparkhvd._util.class_pickling import dumps
from sparkhvd._util.error_chain import error_chain
from sparkhvd._util.framework_imports import gc_paused_for_import
from sparkhvd._util.texts import first_line
from sparkhvd.comm import session
from sparkhvd.config import export, scratch_folder
from sparkhvd.errors import (
    AuthenticationError,
    CollectiveError,
    DataError,
    DeadlineExceededError,
    HorovodInternalError,
    MismatchError,
    ParamError,
)
from sparkhvd.task.failure_report import ENDED, STARTING
from sparkhvd.task.worker.command import CommandEndedError
from sparkhvd.task.worker.exit import end_process, flush_output, keep_ended_children, kill_session
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.scratch import remove_scratch
from sparkhvd.task.worker.spec import FnEnded, Joined, Leave, Raised, Ready, Returned, WorkerSpec
from sparkhvd.task.worker.template import Offer, credentials, descriptor_of, native_threads, split_off_template

# How long the process waits for the task's answer to its report before it ends. The task answers at once.
_LEAVE_SECONDS = 10.0
# The fraction of the task's timeout after which the stacks are printed, so that the task has time to read all of them.
_STACKS_AFTER = 0.8
_STDERR = 2
# How the messages of the core name a rank.
_RANKS = re.compile(r"\branks? (\d+)")
# Errors of the program or its input, which every attempt would raise.
_FINAL_ERRORS = (DataError, MismatchError, ParamError)
# The exit code of a program that a signal ended, as shells report it, is this plus the number of the signal. Programs
# that handle a signal use the same codes.
_SIGNAL_CODES = 128
# The address of an object, which differs between otherwise equal messages.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def main(arguments: list[str]) -> int:
    """Import the modules, wait for the spec, run ``fn`` and report how it ended; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--template-fds", type=int, nargs=2)
    parser.add_argument("--warm-seconds", type=float, default=0.0)
    parser.add_argument("preload", nargs="*")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    keep_ended_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    python_threads = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
    connection, inbox, links = _connect(options.control_fd)
    known_threads = native_threads() - python_threads
    with gc_paused_for_import():
        for name in options.preload:
            with contextlib.suppress(ImportError):  # fn raises a clearer error if it needs the module
                importlib.import_module(name)
    if options.template_fds is not None:
        listener, owner = options.template_fds
        offer = Offer(socket.socket(fileno=listener), owner)
        if (control := split_off_template(offer, options.warm_seconds, links, known_threads)) is not None:
            connection, inbox, _ = _connect(control)
    try:
        spec = pickle.loads(inbox.get())
        if not isinstance(spec, WorkerSpec):
            raise TypeError(f"The task sent {type(spec).__name__} instead of a WorkerSpec.")
        return _run_job(spec, connection, inbox)
    finally:
        remove_scratch(scratch_folder())  # normally the task removes it, but the task may have ended


def _connect(control: int) -> tuple[Connection, queue.SimpleQueue[bytes], list[int]]:
    """Return this worker's private socket, the queue of the pickled messages of its task, and the watched descriptors.

    Only the main thread unpickles. Another thread could be importing a module while a template is forked, which would
    leave the template with an incomplete module.
    """
    os.set_inheritable(control, False)  # programs that the worker executes must not keep the socket open
    links = [control]
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(control)) as link:
        links.append(descriptor_of(credentials(link)[0]))
    connection = Connection(control)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(
        target=_watch_task, args=(connection, links, inbox), name="sparkhvd-task-watch", daemon=True
    ).start()
    return connection, inbox, links


def _run_job(spec: WorkerSpec, connection: Connection, inbox: queue.SimpleQueue[bytes]) -> int:
    export({**dict(spec.variables), IMPORT_PATH: spec.import_path})
    _configure_logging(int(dict(spec.variables)["SPARKHVD_LOG_LEVEL"]))
    session.set_launch_context(spec.context, lambda: connection.send_bytes(pickle.dumps(Joined())), spec.commits)
    connection.send_bytes(pickle.dumps(Ready()))

    def on_end() -> None:
        seconds = spec.context.config.result_timeout
        _dump_stacks_after(seconds)
        connection.send_bytes(pickle.dumps(FnEnded(seconds)))

    report = run_payload(spec.payload, on_end)
    if isinstance(report, Returned):
        session.leave_before_init()
        try:
            session.shutdown()
        except CollectiveError as error:
            report = _raised_report(error, "failed while leaving the job", "")
    flush_output()
    connection.send_bytes(pickle.dumps(report))
    # A failing rank stays connected until its failure is recorded. Otherwise, other ranks could report its loss first.
    with contextlib.suppress(queue.Empty):
        while not isinstance(message := pickle.loads(inbox.get(timeout=_LEAVE_SECONDS)), Leave):
            continue
        if isinstance(report, Returned):
            _dump_stacks_after(message.seconds)
    if isinstance(report, Raised):
        with contextlib.suppress(CollectiveError):
            session.shutdown()
        return 1
    return 0


def _dump_stacks_after(seconds: float) -> None:
    """Print every thread's stack shortly before the task gives up, even while native code holds the GIL."""
    faulthandler.dump_traceback_later(min(max(seconds * _STACKS_AFTER, 0.001), threading.TIMEOUT_MAX), file=_STDERR)


def run_payload(payload: bytes, on_end: Callable[[], None] = lambda: None) -> Returned | Raised:
    """Run the pickled ``(fn, args, kwargs)``, and return a report of its result or error.

    A process that ``fn`` forked does not return from this function: it ends as soon as it leaves ``fn``.

    Args:
        payload: the pickled call.
        on_end: called when ``fn`` has ended, before its result or error is pickled.
    """
    worker_pid = os.getpid()
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
    except ModuleNotFoundError as error:
        return _raised_report(error, _not_importable(error.name), STARTING)
    except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
        return _raised_report(error, f"could not unpickle fn: {type(error).__name__}: {_message(error)}", STARTING)
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything; the report carries it
        if os.getpid() != worker_pid:
            _end_child(error)
        if not (isinstance(error, SystemExit) and error.code in {None, 0}):
            on_end()
            return _failure_of_fn(error)
        result = None
    if os.getpid() != worker_pid:
        _end_child(None)
    on_end()
    try:
        return Returned(dumps(result))
    except Exception as error:  # noqa: BLE001 - pickling runs the user's code
        cause = f"returned a {type(result).__name__} that cannot be pickled: {_message(error)}"
        return _raised_report(error, cause, ENDED)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked process that has left ``fn``. Only the worker itself sends a report and runs exit handlers."""
    code = 0
    try:
        if error is None:
            sys.stderr.write(
                "sparkhvd: A process that fn forked returned from fn. Its return value is ignored; the result of the "
                "rank is what the rank's own process returns. End a forked process with os._exit().\n"
            )
        elif isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        else:
            code = 1
            traceback.print_exception(error)
        flush_output()
    finally:
        os._exit(code & 0xFF)


def _failure_of_fn(error: BaseException) -> Raised:
    if isinstance(error, CommandEndedError):  # the program's stderr explains the failure
        return Raised(str(error), traceback="", secondary=False, phase="", error=_comparable_error(error))
    if isinstance(error, SystemExit):
        cause = f"called sys.exit({error.code!r})"
    else:
        cause = f"raised {type(error).__name__}: {_message(error) or _raising_line(error)}"
    is_final = isinstance(error, _FINAL_ERRORS)
    return replace(_raised_report(error, cause), error=_comparable_error(error), is_final=is_final)


def _comparable_error(error: BaseException) -> str:
    """Return ``FailureReport.error`` for an error of ``fn``; empty if a signal or a failed collective is the cause."""
    if isinstance(error, SystemExit | CommandEndedError) and isinstance(error.code, int):
        return f"exit code {error.code}" if 0 < error.code < _SIGNAL_CODES else ""
    if isinstance(error, MismatchError) or not isinstance(error, HorovodInternalError | KeyboardInterrupt):
        line = first_line(_message(error) or _raising_line(error))
        return f"{type(error).__name__}: {_ADDRESS.sub('0x...', line)}"
    return ""


def _message(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception as str_error:  # noqa: BLE001 - the user's code may raise anything
        return f"(its message cannot be shown, because its str() raises {type(str_error).__name__})"


def _raising_line(error: BaseException) -> str:
    """Return where an error without a message was raised, with the source line if it is known here."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message"
    return f"line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)}: {frames[-1].line or frames[-1].name}"  # noqa: PTH119


def _raised_report(error: BaseException, cause: str, phase: str | None = None) -> Raised:
    return Raised(cause, "".join(traceback.format_exception(error)), _is_secondary(error), phase)


def _not_importable(module: str | None) -> str:
    return (
        f"cannot import the module {module!r} that fn needs. Install it on the executors, send it there with "
        "SparkSession.addArtifacts(..., pyfile=True) or SparkContext.addPyFile, or define the code in the main script "
        "or notebook, which is sent with fn"
    )


def _is_secondary(raised: BaseException) -> bool:
    """Return whether another rank's failure caused this error, judged by its type and message."""
    own_rank = session.launch_context().world.rank
    for error in error_chain(raised):
        if isinstance(error, AuthenticationError):
            return True  # a peer that ends during the handshake looks like one that does not know the secret
        if isinstance(error, CollectiveError | DeadlineExceededError) and not isinstance(error, MismatchError):
            # If this rank itself failed, the core's message begins with "rank {own_rank}: " or names no rank.
            others = {int(rank) for rank in _RANKS.findall(str(error))} - {own_rank}
            is_own_failure = str(error).startswith(f"rank {own_rank}: ")
            return type(error) is not CollectiveError or (bool(others) and not is_own_failure)
    return False


def _watch_task(connection: Connection, links: Sequence[int], inbox: queue.SimpleQueue[bytes]) -> None:
    """Queue the task's messages until the task ends or closes its end of the socket; then end this whole session.

    The kernel's parent-death signal is not enough: it would end this process, but not its children. The socket is not
    enough either: a process that the task has forked keeps its end open.

    Args:
        connection: the socket.
        links: its descriptor, and that of the task's process if the kernel has one.
        inbox: receives the messages.
    """
    with contextlib.suppress(EOFError, OSError):
        while connection.fileno() in wait(links):
            inbox.put(connection.recv_bytes())
    remove_scratch(scratch_folder())
    kill_session(os.getsid(0))
    os.killpg(0, signal.SIGKILL)


def _configure_logging(level: int) -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(level)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
