"""The ``trainable`` flags of a TensorFlow graph, which trains the layers that were trainable when it was traced."""

from __future__ import annotations

import keras

from sparkhvd.estimators.keras.serialization.omissions import Omissions


class GraphFlags:
    """Keeps the ``trainable`` flags with which the graph of a training step was traced, for a run that resumes.

    A callback may change flags before and after the first step. A checkpoint therefore holds the flags of the graph and
    the flags of the model. Eager steps and PyTorch read the flags of the model in every step.

    Args:
        model: the model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._step: object = None  # the traced step
        self._from_fit: object = None  # the step that Keras made when the training began
        self._traced: Omissions | None = None
        self._own: Omissions | None = None  # the flags of the model, while others are set for a trace
        self.resumed: Omissions | None = None  # the flags of the graph in the checkpoint

    @property
    def traced(self) -> Omissions | None:
        """The flags of the graph that the next step runs; None if that step traces one, or runs without a graph."""
        return self._traced if self._model.train_function is self._step else None

    def begin(self) -> None:
        """Record the step that Keras made for the training, before a callback can request a new one."""
        self._from_fit = self._model.train_function

    def begin_batch(self) -> None:
        """Begin a batch, after callbacks have changed flags."""
        step = self._model.train_function
        if step is self._step or keras.config.backend() != "tensorflow" or self._model.run_eagerly:
            return
        self._step = step
        self._traced = own = Omissions.of_training(self._model)
        if self.resumed is not None and step is self._from_fit:  # else a callback has requested a new graph
            self._traced, self._own = self.resumed, own
            self.resumed.restore(self._model)

    def end_batch(self) -> None:
        """End a batch, before callbacks can read the flags."""
        if self._own is not None:
            self._own.restore(self._model)
            self._own = None
