"""States: the values that an elastic job keeps when its ranks change."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from sparkhvd.comm import objects, session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError, HostsUpdatedInterrupt, MismatchError

_SHOWN = 3  # parts that an error lists


class State:
    """The state of an elastic job; derive from it to keep state of your own.

    A subclass defines ``save``, ``restore`` and ``sync``, and ``reset`` if it depends on the number of ranks.

    Args:
        bcast_object: ignored; accepted so that states written for Horovod work.
        get_rank: ignored, too.
    """

    _reset_callbacks: tuple[Callable[[], None], ...] = ()  # a subclass may not call __init__

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        del bcast_object, get_rank

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after each reset, before ``sync``; they may adapt the learning rate to ``hvd.size()``.

        Args:
            callbacks: functions without arguments.
        """
        self._reset_callbacks = (*self._reset_callbacks, *callbacks)

    def on_reset(self) -> None:
        """Adapt to new ranks: call ``reset`` and the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory, then check for new or withdrawn slots. Call it on all ranks after the same step.

        Raises:
            HostsUpdatedInterrupt: the slots of the job have changed; ``hvd.elastic.run`` handles it.
        """
        self.save()
        membership = session.membership()
        if membership is not None:
            membership.commit = max(membership.commit, 0) + 1
            publisher = session.publisher()
            if publisher is not None and session.rank() == 0:
                publisher.publish_if_due(
                    membership.generation, membership.commit, self.dump_commit, membership.published
                )
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check for new or withdrawn slots without saving. Call it on all ranks after the same step.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if the slots of the job have changed.
        """
        membership = session.membership()
        if membership is None:
            return
        communicator = session.current()
        notified = communicator.world.rank == 0 and membership.is_notified()
        if communicator.world.size > 1:  # a small sum takes one exchange in shared memory, a broadcast takes more
            count = np.array([notified], np.int64)
            notified = bool(communicator.allreduce(count, ReduceOp.SUM, name="elastic.check_host_updates").item())
        if notified:
            raise HostsUpdatedInterrupt("The slots of this job have changed, so its ranks form a new generation.")

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError(f"{type(self).__name__} must define save().")

    def restore(self) -> None:
        """Return to the copy that ``save`` has kept."""
        raise NotImplementedError(f"{type(self).__name__} must define restore().")

    def sync(self) -> None:
        """Overwrite the state of all ranks with that of rank 0, and save it; collective."""
        raise NotImplementedError(f"{type(self).__name__} must define sync().")

    def dump_commit(self) -> bytes:
        """Return the copy that ``save`` has kept; needed only for ``run_elastic(store=...)``."""
        raise ConfigError(
            f"{type(self).__name__} must define dump_commit() and load_commit() so that run_elastic can keep its "
            "commits in a Store."
        )

    def load_commit(self, content: bytes) -> None:
        """Replace the state by one that ``dump_commit`` has returned, in another process."""
        del content
        raise ConfigError(f"{type(self).__name__} must define load_commit().")

    def reset(self) -> None:
        """Adapt to another number of ranks; called after they are connected and before ``sync``."""


class ObjectState(State):
    """Plain values, such as ``ObjectState(epoch=0, batch=0)``, as attributes.

    Args:
        bcast_object: ignored; accepted so that calls written for Horovod work.
        get_rank: ignored, too.
        **kwargs: the initial values; cloudpickle must be able to pickle them.

    Raises:
        ConfigError: a value has the name of a method, or of an attribute that the state uses itself; or it cannot be
            copied.
    """

    _values: tuple[str, ...] = ()
    _saved: Any = None

    def __init__(self, bcast_object: object = None, get_rank: object = None, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._values = tuple(kwargs)
        for name, value in kwargs.items():
            self._require_free(name)
            setattr(self, name, value)
        self.save()

    def _require_free(self, name: str) -> None:
        """Raise ``ConfigError`` if an attribute ``name`` would replace a method, or what the state keeps for itself."""
        kind = type(self).__name__
        if callable(getattr(type(self), name, None)):
            reason = f"{kind}.{name}() is a method"
        elif isinstance(getattr(type(self), name, None), property):
            reason = f"{kind}.{name} is a property"
        elif name.startswith("_") and (name in vars(self) or hasattr(type(self), name)):
            reason = f"{kind} uses this name itself"
        else:
            return
        raise ConfigError(f"A value of a state cannot be named {name!r}: {reason}. Choose another name.")

    def save(self) -> None:
        """Keep a copy of the values in memory."""
        values = self._live()
        try:
            self._saved = copy.deepcopy(values)
        except Exception:
            _require_copyable(values)
            raise

    def restore(self) -> None:
        """Return to the values of the last commit or ``sync``."""
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Overwrite the state of all ranks with that of rank 0, and save it; collective.

        Raises:
            MismatchError: the ranks have different values by name, or different models, optimizers or variables.
        """
        _require_equal_forms(self._form())
        self._send()
        self.save()

    def _form(self) -> list[str]:
        """Describe the parts of this rank's state, in the order in which their values are sent."""
        return [f"the value {name!r}" for name in sorted(self._values)]

    def _send(self) -> None:
        """Overwrite the parts of all ranks with those of rank 0; collective."""
        values = objects.broadcast_object(session.current(), self._live(), name="elastic.values")
        for name, value in values.items():
            setattr(self, name, value)

    def dump_commit(self) -> bytes:
        """Return the state of the last commit or ``sync``.

        Raises:
            ConfigError: a subclass saves more than this method returns.
        """
        saves = _owner(type(self), "save")
        if not issubclass(_owner(type(self), "dump_commit"), saves) and not issubclass(
            _owner(type(self), "_kept"), saves
        ):
            raise ConfigError(
                f"{saves.__name__} overrides save(), so it must also define dump_commit() and load_commit() for "
                "run_elastic to keep its commits in a Store."
            )
        content: bytes = cloudpickle.dumps(self._kept())
        return content

    def load_commit(self, content: bytes) -> None:
        """Replace the state by one that ``dump_commit`` has returned, in another process."""
        self._keep(cloudpickle.loads(content))
        self.restore()

    def _kept(self) -> dict[str, Any]:
        """Return the copy that ``save`` has kept."""
        return {"values": self._saved}

    def _keep(self, kept: dict[str, Any]) -> None:
        """Set the copy that ``restore`` returns to."""
        self._saved = kept["values"]

    def __getattr__(self, name: str) -> Any:  # only so that type checkers accept the attributes
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _live(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._values}


def _require_copyable(values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first value that cannot be copied."""
    for name, value in values.items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # a user's __deepcopy__ may raise anything
            raise ConfigError(
                f"The value {name!r} of the state cannot be copied, as every commit does: {type(error).__name__}: "
                f"{error}. It is a {type(value).__name__}; keep it outside of the state."
            ) from error


def _require_equal_forms(form: Sequence[str]) -> None:
    """Raise an error on all ranks if their states have different parts; collective.

    Otherwise a rank would wait forever for the values of parts that another rank does not have.

    Args:
        form: the parts of this rank's state.

    Raises:
        MismatchError: the parts of the ranks differ.
    """
    communicator = session.current()
    digest = hashlib.blake2b("\n".join(form).encode(), digest_size=16).digest()
    digests = objects.allgather_object(communicator, digest, name="elastic.form")
    other = next((rank for rank, of_rank in enumerate(digests) if of_rank != digests[0]), None)
    if other is None:
        return
    forms = objects.allgather_object(communicator, list(form), name="elastic.parts")
    differences = _differences(forms[0], forms[other], other)
    raise MismatchError(
        f"The states of the ranks differ, so they cannot be synchronized: {differences}. "
        "A new rank runs the program from its start. So create the same model, optimizer and values on all ranks "
        "before you call the decorated function, and do not replace them while the job runs."
    )


def _differences(first: Sequence[str], second: Sequence[str], rank: int) -> str:
    """Describe how the parts of ``rank`` differ from those of rank 0."""
    only = {0: Counter(first) - Counter(second), rank: Counter(second) - Counter(first)}
    listed = [f"only rank {of} has {_few(list(parts.elements()))}" for of, parts in only.items() if parts]
    return ", ".join(listed) or f"rank {rank} has the parts of rank 0 in another order"


def _few(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:_SHOWN])
    return shown if len(parts) <= _SHOWN else f"{shown} and {len(parts) - _SHOWN} more"


def _owner(kind: type, name: str) -> type:
    """Return the class that defines a method."""
    return next(one for one in kind.__mro__ if name in vars(one))
