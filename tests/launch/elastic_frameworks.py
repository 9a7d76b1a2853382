"""Elastic trainings of the frameworks; imported by their ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.state import ObjectState
from tests.launch.elastic_training import MOST_STEPS, kill, once


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
        while state.step < steps or (state.sizes != (2, 1) and state.step < MOST_STEPS):
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


def synchronize_a_model_whose_state_dict_holds_copies() -> float:
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 5.0 + hvd.rank()))

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "doubled"] = 2 * self.weight.detach()

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.weight.data.copy_(state_dict[prefix + "doubled"] / 2)

    hvd.init()
    model = Doubled()
    hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState(model))
    return float(model.weight[0])


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

    starts = []

    @hvd.elastic.run
    def loop(state):
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


def lose_all_ranks(framework: str, folder: str):
    """Train three steps and kill all ranks; return the step and all numbers of the state that new ranks resume from."""
    state, take, numbers, run_of_framework = TRAININGS[framework]()

    @run_of_framework
    def loop(state):
        if state.step:
            return state.step, numbers()
        while state.step < 3:
            take()
            state.step += 1
            state.commit()
        np.savez(Path(folder, f"rank-{session.rank()}.npz"), *numbers())
        return kill()

    return loop(state)


def torch_training():
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = hvd.elastic.ElasticSampler(range(64))
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, distributed, scheduler=scheduler, sampler=sampler, step=0)

    def take() -> None:
        features, labels = rows_of_step(state.step, 8)
        distributed.zero_grad()
        torch.nn.functional.mse_loss(model(features), labels).backward()
        distributed.step()
        scheduler.step()
        sampler.record_batch(state.step, 2)

    def numbers():
        moments = [value for one in distributed.state_dict()["state"].values() for value in one.values()]
        tensors = [value.detach().numpy().copy() for value in [*model.state_dict().values(), *moments]]
        return [*tensors, np.array([*scheduler.get_last_lr(), scheduler.last_epoch, sampler.processed_num])]

    return state, take, numbers, hvd.elastic.run


def tensorflow_training():
    import tensorflow as tf  # noqa: PLC0415

    import sparkhvd.tensorflow as hvd  # noqa: PLC0415

    hvd.init()
    variables = [tf.Variable(tf.random.normal([4, 2])), tf.Variable(0.0)]
    state = hvd.elastic.TensorFlowState(variables, step=0)

    def take() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(variables[0] + variables[1] - 1.0))
        for variable, slope in zip(variables, hvd.DistributedGradientTape(tape).gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * slope)

    return state, take, lambda: [variable.numpy() for variable in variables], hvd.elastic.run


def keras_training():
    import sparkhvd.keras as hvd  # noqa: PLC0415

    hvd.init()
    model, optimizer = keras_model()
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    state = hvd.elastic.KerasState(model, step=0)

    def take() -> None:
        model.fit(*keras_rows(state.step), KERAS_BATCH, shuffle=False, verbose=0)

    def numbers():
        return [np.array(variable) for variable in [*model.variables, *model.optimizer.variables]]

    return state, take, numbers, hvd.elastic.run


def plain_training():
    session.init()
    state = ObjectState(step=0, numbers=[])
    return state, lambda: state.numbers.append(np.random.default_rng().random(3)), lambda: state.numbers, run


TRAININGS = {
    "plain": plain_training,
    "torch": torch_training,
    "tensorflow": tensorflow_training,
    "keras": keras_training,
}
