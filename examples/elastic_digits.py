"""Train a PyTorch network on ranks that may be lost, and that are replaced while the training continues.

    python examples/elastic_digits.py --num-proc 2

In the second epoch, the last rank is killed. The others continue from their last commit with the scans that the epoch
has not used yet, and a new rank joins them. The data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
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
    sizes, rows, accuracy = results[0]
    print("ranks in each generation:", *sizes)
    print("scans in each epoch:", *rows)
    print(f"held-out accuracy: {accuracy:.1%}")


def train(epochs: int) -> tuple[list[int], list[int], float]:
    """Run on every rank.

    Returns:
        The number of ranks in each generation, the number of scans in each epoch, and the share of held-out digits that
        are recognized.
    """
    import sparkhvd.torch as hvd

    # A new rank runs this function from its beginning. The other ranks train until it reaches hvd.init().
    pixels, digit = map(torch.tensor, load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    measure = torch.nn.CrossEntropyLoss()
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.002), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(1500))
    loader = torch.utils.data.DataLoader(range(1500), batch_size=BATCH, sampler=sampler)
    # All that changes during the training. A commit keeps a copy; new ranks receive it.
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, sizes=[], rows=[])

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> tuple[list[int], list[int], float]:
        # Called again after every change of the ranks, so it continues from the state.
        state.sizes = [*state.sizes, hvd.size()]
        while state.epoch < epochs:
            for number, rows in enumerate(loader):
                optimizer.zero_grad()
                measure(model(pixels[rows]), digit[rows]).backward()
                if state.epoch == 1 and number == 10 and hvd.rank() == hvd.size() - 1 and len(state.sizes) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                state.sampler.record_batch(number, BATCH)
                if number % 5 == 4:
                    state.commit()  # a new rank joins here
            state.rows = [*state.rows, state.sampler.processed_num]
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()
        with torch.no_grad():
            hits = model(pixels[1500:]).argmax(dim=1) == digit[1500:]
        return state.sizes, state.rows, float(hits.float().mean())

    return loop(state)


if __name__ == "__main__":
    main()
