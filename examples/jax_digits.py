"""Train a JAX model on several ranks, which average their gradients after every batch.

    python examples/jax_digits.py --num-proc 2

The data are scikit-learn's scans of handwritten digits. Several ranks with small batches take the same steps as one
rank with a large batch.
"""

from __future__ import annotations

import argparse

import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import sparkhvd

BATCH = 64  # rows per step, divided among the ranks
HIDDEN = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the rows (default: %(default)s)")
    options = parser.parse_args()

    spark = SparkSession.builder.master(f"local[{options.num_proc}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        results = sparkhvd.run(train, (options.epochs,), num_proc=options.num_proc)
    finally:
        spark.stop()
    losses, accuracy = results[0]
    print(f"loss: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    print(f"held-out accuracy, {options.num_proc} ranks: {accuracy:.1%}")


def train(epochs: int) -> tuple[list[float], float]:
    """Run on every rank; return the losses by epoch and the share of held-out digits that are recognized."""
    import jax
    import jax.numpy as jnp

    import sparkhvd.numpy as hvd

    def loss_of(weights: dict[str, jax.Array], pixels: jax.Array, digit: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(scores(weights, pixels))[jnp.arange(len(digit)), digit].mean()

    def scores(weights: dict[str, jax.Array], pixels: jax.Array) -> jax.Array:
        return jax.nn.relu(pixels @ weights["first"]) @ weights["second"]

    hvd.init()
    pixels, digit = load_digits(return_X_y=True)
    pixels, held_out, digit, answers = pixels[:1500] / 16, pixels[1500:] / 16, digit[:1500], digit[1500:]

    weights = initial_weights(pixels.shape[1])
    gradient_of = jax.jit(jax.value_and_grad(loss_of))
    order = np.random.default_rng(5)  # gives all ranks the same order of the rows
    losses = []
    for _ in range(epochs):
        batches = np.split(order.permutation(len(pixels)), range(BATCH, len(pixels), BATCH))[:-1]
        epoch = []
        for rows in batches:
            mine = rows[hvd.rank() :: hvd.size()]
            loss, gradients = gradient_of(weights, pixels[mine], digit[mine])
            leaves, structure = jax.tree.flatten((loss, gradients))
            # Collectives run outside of jax.jit. One of them averages the loss and all gradients.
            loss, gradients = jax.tree.unflatten(structure, hvd.grouped_allreduce(leaves))
            weights = jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, weights, gradients)
            epoch.append(float(loss))
        losses.append(float(np.mean(epoch)))
    return losses, float((scores(weights, held_out).argmax(axis=1) == answers).mean())


def initial_weights(inputs: int) -> dict[str, np.ndarray]:
    """Return the same weights on every rank. Without a fixed seed, ``hvd.broadcast`` would be necessary."""
    draw = np.random.default_rng(7)
    shapes = {"first": (inputs, HIDDEN), "second": (HIDDEN, 10)}
    return {name: draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


if __name__ == "__main__":
    main()
