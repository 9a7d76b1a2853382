"""Train a Keras network with ``model.fit`` on ranks that may be lost, and that are replaced while it continues.

    python examples/elastic_keras_digits.py --num-proc 2

In the second epoch, the last rank is killed. The others continue from their last commit with the scans that the epoch
has not used yet, and a new rank joins them. The data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import sparkhvd

BATCH = 16  # per rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the rows (default: %(default)s)")
    options = parser.parse_args()

    spark = SparkSession.builder.master(f"local[{options.num_proc}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        results = sparkhvd.run_elastic(train, (options.epochs,), num_proc=options.num_proc, min_num_proc=1)
    finally:
        spark.stop()
    sizes, accuracy = results[0]
    print("ranks in each generation:", *sizes)
    print(f"held-out accuracy: {accuracy:.1%}")


def train(epochs: int) -> tuple[list[int], float]:
    """Run on every rank; return the number of ranks in each generation and the share of recognized held-out digits."""
    import keras

    import sparkhvd.keras as hvd

    def count_rows(_batch: int, **_: object) -> None:
        state.rows += BATCH * hvd.size()

    def kill_once(batch: int, **_: object) -> None:
        if state.epoch == 1 and batch == 10 and hvd.rank() == hvd.size() - 1 and len(state.sizes) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    # A new rank runs this function from its beginning. The other ranks train until it reaches hvd.init().
    pixels, digit = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32) / 16
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")],
    )
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    # All that changes during the training. A commit keeps a copy; new ranks receive it.
    state = hvd.elastic.KerasState(model, epoch=0, rows=0, sizes=[])
    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_begin=kill_once, on_train_batch_end=count_rows),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
    ]

    @hvd.elastic.run
    def loop(state: hvd.elastic.KerasState) -> tuple[list[int], float]:
        # Called again after every change of the ranks, so it continues from the state.
        state.sizes = [*state.sizes, hvd.size()]
        while state.epoch < epochs:
            order = np.random.default_rng(state.epoch).permutation(1500)[state.rows :]
            mine = order[hvd.rank() : len(order) // hvd.size() * hvd.size() : hvd.size()]  # equally many on all ranks
            if len(mine):
                model.fit(pixels[mine], digit[mine], batch_size=BATCH, shuffle=False, callbacks=callbacks, verbose=0)
            state.epoch += 1
            state.rows = 0
            state.commit()  # a new rank joins here, or at a commit of the callback
        hits = model.predict(pixels[1500:], verbose=0).argmax(axis=1) == digit[1500:]
        return state.sizes, float(hits.mean())

    return loop(state)


if __name__ == "__main__":
    main()
