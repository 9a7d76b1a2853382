"""The random generators of a rank, which are seeded when an epoch begins and restored when it is resumed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.random.seed_generator import global_seed_generator  # Keras does not export it

from sparkhvd.estimators.keras.checkpoint.arrays import arrays_from_bytes, value_of
from sparkhvd.estimators.plugin import TrainHooks, TrainSpec
from sparkhvd.keras.variables import seed_states

States = dict[str, npt.NDArray[np.generic]]

_UNORDERED_STATES = 933199  # Keras reduces the state of its global generator modulo this number


class RandomStates:
    """The states of the random generators of layers, Keras, its backend, NumPy and Python.

    The states of layers (dropout, noise), Keras and its backend differ between ranks. NumPy and Python draw equal
    numbers on all ranks, because callbacks may use them to set a learning rate.

    Args:
        model: the model.
        spec: contains the seed of the training.
        rank: the rank.
        hooks: its ``rank_state`` contains the result of ``state`` if the same ranks resume an epoch.
    """

    def __init__(self, model: keras.Model, spec: TrainSpec, rank: int, hooks: TrainHooks) -> None:
        self.variables = seed_states(model)
        self._spec = spec
        self._rank = rank
        self._hooks: TrainHooks | None = hooks  # until the first batch
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

            # For operations such as tf.random.normal, whose states cannot be saved. A graph keeps the seeds with which
            # it is traced, and would draw the same numbers again in every epoch that sets them.
            tf.random.set_seed(spec.seed_of(hooks.first_epoch, rank, hooks.steps_done))

    def begin_epoch(self, epoch: int) -> None:
        """Set the states for an epoch: different ones in every epoch, but the same ones in a resumed run."""
        self._seed(epoch, 0)

    def _seed(self, epoch: int, step: int) -> None:
        common, own = self._spec.seed_of(epoch, 0, step), self._spec.seed_of(epoch, self._rank, step)
        _seed_backend(own)
        *sequences, unordered = np.random.SeedSequence(own).spawn(len(self.variables) + 1)
        for variable, sequence in zip(self.variables, sequences, strict=True):
            # Some backends have signed states, so the values must fit into 31 bits.
            _assign(variable, sequence.generate_state(2) >> 1)
        _assign(global_seed_generator().state, unordered.generate_state(2) % _UNORDERED_STATES)
        np.random.seed(common % 2**32)  # after Keras, which draws a number when it creates its generator
        random.seed(common)

    def begin_batch(self) -> None:
        """Set the states of a resumed epoch before its first batch, but after callbacks have begun the epoch."""
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        if (content := hooks.rank_state) is None:
            if hooks.steps_done:
                self._seed(hooks.first_epoch, hooks.steps_done)
            return
        saved = arrays_from_bytes(content)
        for index, variable in enumerate(self.variables):
            _assign(variable, saved[str(index)])
        _set_process_states(saved)
        if "keras" in saved:  # checkpoints of older versions lack it
            _assign(global_seed_generator().state, saved["keras"])
            _set_backend_states(saved)

    def state(self) -> States:
        """Return the states of this rank, for its ``StepReport.rank_state``."""
        own = {str(index): value_of(variable) for index, variable in enumerate(self.variables)}
        common = {"keras": value_of(global_seed_generator().state), **_process_states(), **_backend_states()}
        return own | common


def _process_states() -> States:
    """Return the states of the generators of NumPy and Python."""
    _, keys, *rest = np.random.get_state(legacy=True)
    _, numbers, gauss = random.getstate()
    return {
        "numpy": np.asarray(keys),
        "numpy_rest": np.asarray(rest, np.float64),
        "python": np.asarray(numbers, np.int64),
        "python_rest": np.asarray([] if gauss is None else [gauss], np.float64),
    }


def _set_process_states(saved: Mapping[str, npt.NDArray[np.generic]]) -> None:
    position, has_gauss, gauss = saved["numpy_rest"].tolist()
    np.random.set_state(("MT19937", saved["numpy"].astype(np.uint32), int(position), int(has_gauss), gauss))
    next_gauss = saved["python_rest"].tolist()
    random.setstate((3, tuple(saved["python"].tolist()), next_gauss[0] if next_gauss else None))


def _seed_backend(seed: int) -> None:
    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        torch.manual_seed(seed)
    elif keras.config.backend() == "tensorflow":
        _tensorflow_generator(seed).reset_from_seed(seed)


def _backend_states() -> States:
    """Return the states of the backend's global generators, which a user's layers may use."""
    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        states = {"torch": torch.get_rng_state().numpy()}
        return states | ({"cuda": torch.cuda.get_rng_state().numpy()} if torch.cuda.is_available() else {})
    if keras.config.backend() == "tensorflow":
        return {"tensorflow": _tensorflow_generator().state.numpy()}
    return {}


def _set_backend_states(saved: States) -> None:
    if "torch" in saved:
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        torch.set_rng_state(torch.from_numpy(saved["torch"]))
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(saved["cuda"]))
    if "tensorflow" in saved:
        _tensorflow_generator().state.assign(saved["tensorflow"])


def _tensorflow_generator(seed: int = 0) -> Any:
    """Return TensorFlow's global generator. If operations are deterministic, TensorFlow does not create it itself."""
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    try:
        return tf.random.get_global_generator()
    except RuntimeError:
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
        return tf.random.get_global_generator()


def _assign(variable: keras.Variable, state: npt.NDArray[np.generic]) -> None:
    variable.assign(state.astype(value_of(variable).dtype))
