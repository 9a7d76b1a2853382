"""Elastic trainings that tests run and break; imported by their ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import ObjectState, State

_MOST_STEPS = 2000  # so that a test fails whose ranks do not change as expected


def once(folder: str, event: str) -> bool:
    """Return True to one process only."""
    try:
        Path(folder, event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no luck")


def leave() -> None:
    sys.exit(3)


ENDS: dict[str, Callable[[], None]] = {"kill": kill, "raise": fail, "exit": leave, "exit 0": sys.exit}


def train(steps: int, folder: str, events: dict[tuple[int, int, int], str] | None = None, sizes: tuple[int, ...] = ()):
    """Count steps; ``events`` maps (step, rank, size) to how the rank ends then, once.

    Every rank logs what it has done into its own file. With ``sizes``, train on until the job has had these sizes.
    """
    session.init()
    state = ObjectState(step=0, total=0.0, sizes=())
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(session.size())])

    @run
    def loop(state):
        if state.sizes[-1:] != (session.size(),):
            state.sizes = (*state.sizes, session.size())
        while state.step < steps or (sizes and state.sizes != sizes and state.step < _MOST_STEPS):
            event = (events or {}).get((state.step, session.rank(), session.size()))
            if event and once(folder, f"{event}-{state.step}-{session.rank()}-{session.size()}"):
                log(folder, "end")
                ENDS[event]()
            mean = session.current().allreduce(np.array([state.step + 1.0]), name="step")
            state.total += float(mean[0])
            state.step += 1
            log(folder, f"step {state.step} {session.rank()} {session.size()}")
            time.sleep(0.01)
            state.commit()
        return state.step, state.total, session.rank(), session.size(), os.getpid(), resets

    return loop(state)


def log(folder: str, line: str) -> None:
    with Path(folder, f"log-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{line} {time.monotonic()}\n")


def always_fail_on_the_last_rank(folder: str):
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        while True:
            session.current().barrier()
            state.step += 1
            state.commit()
            if session.rank() == session.size() - 1 > 0:
                raise ValueError(f"no luck at step {state.step}")

    loop(state)


def swallow(folder: str):
    """A training that catches everything."""
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        try:
            while state.step < 10:
                if state.step == 5 and session.rank() == 1 and once(folder, "killed"):
                    kill()
                session.current().allreduce(np.ones(1), name="step")
                state.step += 1
                state.commit()
        except Exception:  # noqa: BLE001 - that is the case
            return "swallowed"
        return state.step

    return loop(state)


def mismatch(folder: str):
    session.init()

    @run
    def loop(state):
        Path(folder, f"call-{session.rank()}-{time.monotonic_ns()}").touch()
        session.current().allreduce(np.ones(1 + session.rank()), name="step")

    loop(ObjectState())


def fail_every_time(folder: str):
    """The same error on all ranks, although nobody is lost."""
    from sparkhvd.errors import CollectiveError  # noqa: PLC0415

    session.init()

    @run
    def loop(state):
        if session.rank() == 0:
            Path(folder, f"call-{time.monotonic_ns()}").touch()
        raise CollectiveError("the network is down")

    loop(ObjectState(step=0))


def keep_a_lock_in_the_state():
    """A state that rank 0 cannot send to the others."""
    session.init()
    state = ObjectState(lock=threading.Lock())
    run(lambda state: state.commit())(state)


def hang_at_the_start(folder: str, which: int):
    """The start with the number ``which`` hangs before ``init()``; the others train, and lose a rank once."""
    number = next(number for number in range(99) if once(folder, f"start-{number}"))
    if number == which:
        time.sleep(600)
    return train(5, folder, {(3, 1, 2): "kill"}, (2, 1, 2))


def hang_once_in_training(folder: str):
    """One rank stops taking part; the others notice by the timeout of a collective."""
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        while state.step < 5:
            if state.step == 2 and session.rank() == 1 and once(folder, "hang"):
                time.sleep(600)
            session.current().allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()
        return state.step

    return loop(state)


class OwnState(State):
    """A state of a user's, without ``super().__init__()``."""

    def __init__(self) -> None:
        self.value = np.zeros(2)
        self.saved = self.value.copy()

    def save(self) -> None:
        self.saved = self.value.copy()

    def restore(self) -> None:
        self.value = self.saved.copy()

    def sync(self) -> None:
        self.value = session.current().broadcast(self.value, 0, name="own")
        self.save()


def train_own_state(folder: str):
    session.init()

    @run
    def loop(state):
        while state.value[0] < 10:
            if state.value[0] == 4 and session.rank() == 0 and session.size() == 2 and once(folder, "killed"):
                kill()
            state.value += session.current().allreduce(np.array([1.0, 2.0]), name="step")
            state.commit()
        return state.value.tolist()

    return loop(OwnState())


def sample(folder: str, length: int, batch: int, epochs: int):
    """Log which samples every committed step has processed."""
    session.init()
    sampler = ElasticSampler(range(length), seed=3)

    class SampledState(ObjectState):
        def save(self) -> None:
            super().save()
            self._sampler = sampler.state_dict()

        def restore(self) -> None:
            super().restore()
            sampler.load_state_dict(self._sampler)

        def sync(self) -> None:
            from sparkhvd.comm.objects import broadcast_object  # noqa: PLC0415

            sampler.load_state_dict(broadcast_object(session.current(), sampler.state_dict(), name="sampler"))
            super().sync()

    state = SampledState(epoch=0, steps=0, seen=[])

    @run
    def loop(state):
        from sparkhvd.comm.objects import allgather_object  # noqa: PLC0415

        while state.epoch < epochs:
            indices = list(sampler)
            for number in range(-(-len(indices) // batch)):
                if session.rank() == 1 and session.size() == 3 and state.steps == 4 and once(folder, "killed"):
                    kill()
                own = indices[number * batch : (number + 1) * batch]
                everyone = allgather_object(session.current(), own, name="batch")
                state.seen = [*state.seen, *((state.epoch, index) for part in everyone for index in part)]
                state.steps += 1
                sampler.record_batch(number, batch)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
        return state.seen, session.size()

    return loop(state)


def train_torch(folder: str, steps: int, batch: int):
    """Fit a line; the gradient of a step is the same for any number of ranks."""
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    torch.manual_seed(hvd.rank())  # new ranks begin with other weights
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if hvd.rank() == 0 and hvd.size() == 2 and once(folder, "first"):
        torch.save(model.state_dict(), Path(folder, "first.pt"))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=())

    @hvd.elastic.run
    def loop(state):
        if state.sizes[-1:] != (hvd.size(),):
            state.sizes = (*state.sizes, hvd.size())
        while state.step < steps or (state.sizes != (2, 1) and state.step < _MOST_STEPS):
            features, labels = rows_of_step(state.step, batch)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), labels)
            loss.backward()
            if state.step == 5 and hvd.rank() == 1 and hvd.size() == 2 and once(folder, "killed"):
                kill()
            optimizer.step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return state.step, {name: value.numpy() for name, value in model.state_dict().items()}

    return loop(state)


def train_tensorflow(folder: str, steps: int):
    """Train an embedding, whose gradient is sparse, by a ``tf.function`` that outlives the generations."""
    import tensorflow as tf  # noqa: PLC0415

    import sparkhvd.tensorflow as hvd  # noqa: PLC0415

    hvd.init()
    table = tf.Variable(tf.zeros([4, 2]))
    bias = tf.Variable(float(hvd.rank()))  # new ranks begin with another one
    state = hvd.elastic.TensorFlowState([table, bias], step=0)

    @tf.function(autograph=False)  # which would leave files if the rank is killed
    def take_step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.gather(table, ids) + bias - 1.0))
        slices, slope = hvd.DistributedGradientTape(tape).gradient(loss, [table, bias])
        assert isinstance(slices, tf.IndexedSlices)
        table.scatter_sub(tf.IndexedSlices(0.1 * slices.values, slices.indices))
        bias.assign_sub(0.01 * slope)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            if state.step == 5 and hvd.rank() == 1 and hvd.size() == 2 and once(folder, "killed"):
                kill()
            take_step(tf.constant(ids_of_step(state.step)))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return table.numpy(), float(bias)

    return loop(state)


def ids_of_step(step: int) -> list[int]:
    return [step % 4, (step * step + 1) % 4, 0]


KERAS_ROWS, KERAS_BATCH, KERAS_EPOCHS = 32, 4, 3


def keras_model():
    import keras  # noqa: PLC0415

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    return model, keras.optimizers.SGD(0.05, momentum=0.5)


def keras_rows(epoch: int):
    random = np.random.default_rng(epoch)
    features = random.normal(size=(KERAS_ROWS, 2)).astype(np.float32)
    return features, features.sum(axis=1, keepdims=True) * 2 + 1


def train_keras(folder: str):
    import keras  # noqa: PLC0415

    import sparkhvd.keras as hvd  # noqa: PLC0415

    hvd.init()
    model, optimizer = keras_model()
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    class Killed(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if (state.epoch, batch) == (1, 3) and hvd.rank() == 1 and hvd.size() == 2 and once(folder, "killed"):
                kill()

    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Killed(),
    ]

    @hvd.elastic.run
    def loop(state):
        starts = []
        while state.epoch < KERAS_EPOCHS:
            starts.append((state.epoch, state.batch))
            features, labels = (array[state.batch * KERAS_BATCH :] for array in keras_rows(state.epoch))
            model.fit(features, labels, KERAS_BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights(), starts

    return loop(state)


def rows_of_step(step: int, batch: int):
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(step)
    features = torch.randn(batch, 4, generator=generator)
    return features, features.sum(1, keepdim=True)
