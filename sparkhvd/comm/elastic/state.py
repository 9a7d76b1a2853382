"""The state of an elastic job: the values that it keeps when its ranks change."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from sparkhvd._util.class_pickling import PeerPickler, dumps
from sparkhvd.comm import objects, session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError, HostsUpdatedInterrupt, MismatchError

_MAX_LISTED = 3  # parts that an error message lists


class State:
    """The base class of states; derive from it to define your own state.

    A subclass defines ``save``, ``restore`` and ``sync``, and ``reset`` if it depends on the number of ranks.

    Args:
        bcast_object: ignored; accepted so that states written for Horovod work.
        get_rank: ignored.
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
        if communicator.world.size > 1:
            notified = bool(communicator.allreduce_now(np.array([notified], np.int64), ReduceOp.SUM).item())
        if notified:
            raise HostsUpdatedInterrupt("The slots of this job have changed, so its ranks form a new generation.")

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError(f"{type(self).__name__} must define save().")

    def restore(self) -> None:
        """Return to the copy that ``save`` made."""
        raise NotImplementedError(f"{type(self).__name__} must define restore().")

    def sync(self) -> None:
        """Overwrite the state of all ranks with that of rank 0, and save it; collective."""
        raise NotImplementedError(f"{type(self).__name__} must define sync().")

    def dump_commit(self) -> bytes:
        """Return the copy that ``save`` made; needed only for ``run_elastic(store=...)``."""
        raise ConfigError(
            f"{type(self).__name__} must define dump_commit() and load_commit() so that run_elastic can keep its "
            "commits in a Store."
        )

    def load_commit(self, content: bytes) -> None:
        """Replace the state with the result of ``dump_commit`` from another process."""
        del content
        raise ConfigError(f"{type(self).__name__} must define load_commit().")

    def reset(self) -> None:
        """Adapt to new ranks; called after they are connected and before ``sync``."""


class ObjectState(State):
    """Plain values, such as ``ObjectState(epoch=0, batch=0)``, as attributes.

    Args:
        bcast_object: ignored; accepted so that calls written for Horovod work.
        get_rank: ignored.
        **kwargs: the initial values; cloudpickle must be able to pickle them.

    Raises:
        ConfigError: a value cannot be copied, or has the name of a method or of an attribute that the state uses.
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
        """Raise ``ConfigError`` if a value ``name`` would replace a method, a property or an internal attribute."""
        class_name = type(self).__name__
        if callable(getattr(type(self), name, None)):
            reason = f"{class_name}.{name}() is a method"
        elif isinstance(getattr(type(self), name, None), property):
            reason = f"{class_name}.{name} is a property"
        elif name.startswith("_") and (name in vars(self) or hasattr(type(self), name)):
            reason = f"{class_name} uses this name itself"
        else:
            return
        raise ConfigError(f"A value of a state cannot be named {name!r}: {reason}. Choose another name.")

    def save(self) -> None:
        """Keep a copy of the values in memory."""
        values = self._current_values()
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
            MismatchError: the names of the values, the models, the optimizers or the variables differ between ranks.
        """
        _require_equal_parts(self._describe_parts())
        self._broadcast()
        self.save()

    def _describe_parts(self) -> list[str]:
        """Describe the parts of this rank's state, in the order in which their values are sent."""
        return [f"the value {name!r}" for name in sorted(self._values)]

    def _broadcast(self) -> None:
        """Overwrite the parts of all ranks with those of rank 0; collective."""
        values = objects.broadcast_object(session.current(), self._current_values(), name="elastic.values")
        for name, value in values.items():
            setattr(self, name, value)

    def dump_commit(self) -> bytes:
        """Return the state of the last commit or ``sync``.

        Raises:
            ConfigError: a subclass overrides ``save`` but not this method.
        """
        saving = _defining_class(type(self), "save")
        dumping = [_defining_class(type(self), name) for name in ("dump_commit", "_saved_copy")]
        if not any(issubclass(definer, saving) for definer in dumping):
            raise ConfigError(
                f"{saving.__name__} overrides save(), so it must also define dump_commit() and load_commit() for "
                "run_elastic to keep its commits in a Store."
            )
        content: bytes = dumps(self._saved_copy(), PeerPickler)
        return content

    def load_commit(self, content: bytes) -> None:
        """Replace the state with the result of ``dump_commit`` from another process."""
        self._set_saved_copy(cloudpickle.loads(content))
        self.restore()

    def _saved_copy(self) -> dict[str, Any]:
        """Return the copy that ``save`` made."""
        return {"values": self._saved}

    def _set_saved_copy(self, saved: dict[str, Any]) -> None:
        """Set the copy that ``restore`` returns to."""
        self._saved = saved["values"]

    def __getattr__(self, name: str) -> Any:  # makes type checkers accept the values as attributes
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _current_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._values}


def copied_arrays(arrays: Sequence[npt.NDArray[Any]], earlier: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Return copies of arrays. They reuse the memory of ``earlier``, the previous copies, where the forms are equal."""
    copies = [
        known if (known.shape, known.dtype) == (array.shape, array.dtype) else np.empty_like(array, order="C")
        for array, known in zip_longest(arrays, earlier[: len(arrays)], fillvalue=np.empty(0, np.void))
    ]
    for array, copy_of_array in zip(arrays, copies, strict=True):
        np.copyto(copy_of_array, array)
    return copies


def _require_copyable(values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first value that cannot be copied."""
    for name, value in values.items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # a user's __deepcopy__ may raise anything
            raise ConfigError(
                f"The value {name!r} of the state cannot be copied, but every commit copies it: "
                f"{type(error).__name__}: {error}. It is a {type(value).__name__}; keep it outside of the state."
            ) from error


def _require_equal_parts(parts: Sequence[str]) -> None:
    """Raise an error on all ranks if their states have different parts; collective.

    Otherwise a rank would wait forever for the values of parts that another rank does not have.

    Args:
        parts: descriptions of the parts of this rank's state.

    Raises:
        MismatchError: the parts of the ranks differ.
    """
    communicator = session.current()
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
    digests = objects.allgather_object(communicator, digest, name="elastic.digest")
    differing_rank = next((rank for rank, other_digest in enumerate(digests) if other_digest != digests[0]), None)
    if differing_rank is None:
        return
    all_parts = objects.allgather_object(communicator, list(parts), name="elastic.parts")
    differences = _differences(all_parts[0], all_parts[differing_rank], differing_rank)
    raise MismatchError(
        f"The states of the ranks differ, so they cannot be synchronized: {differences}. "
        "A new rank runs the program from its start. So create the same model, optimizer and values on all ranks "
        "before you call the decorated function, and do not replace them while the job runs."
    )


def _differences(first: Sequence[str], second: Sequence[str], rank: int) -> str:
    """Describe how the parts of ``rank`` differ from those of rank 0."""
    extra = {0: Counter(first) - Counter(second), rank: Counter(second) - Counter(first)}
    differences = [
        f"only rank {owner} has {_listed(list(parts.elements()))}" for owner, parts in extra.items() if parts
    ]
    return ", ".join(differences) or f"rank {rank} has the parts of rank 0 in another order"


def _listed(parts: Sequence[str]) -> str:
    first_parts = ", ".join(parts[:_MAX_LISTED])
    return first_parts if len(parts) <= _MAX_LISTED else f"{first_parts} and {len(parts) - _MAX_LISTED} more"


def _defining_class(cls: type, name: str) -> type:
    """Return the class that defines a method of ``cls``."""
    return next(base for base in cls.__mro__ if name in vars(base))
