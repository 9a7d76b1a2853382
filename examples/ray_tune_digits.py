"""Search for a learning rate with Ray Tune. Each trial trains on two ranks in its own placement group.

    python examples/ray_tune_digits.py --trials 4

The data are scikit-learn's scans of handwritten digits. A trial reports every epoch and saves a checkpoint, so that Ray
Tune can stop bad trials early and resume lost ones.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from ray import tune
from sklearn.datasets import load_digits

from sparkhvd.ray import RayExecutor

RANKS = 2
BATCH = 32  # rows per step and rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=4, help="learning rates to try (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", default="ray-tune", help="where results are written (default: %(default)s)")
    options = parser.parse_args()

    # The first bundle is for the trial itself, which only waits for its ranks. Each rank has one of the other bundles.
    resources = tune.PlacementGroupFactory([{}, *[{"CPU": 1}] * RANKS])
    tuner = tune.Tuner(
        tune.with_resources(trial, resources),
        param_space={"rate": tune.loguniform(1e-4, 1e-1), "epochs": options.epochs},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=options.trials),
        run_config=tune.RunConfig(storage_path=str(Path(options.folder).resolve()), verbose=0),
    )
    results = tuner.fit()
    best = results.get_best_result()
    print(f"{len(results)} trials, {results.num_errors} of them failed")
    print(f"best learning rate: {best.config['rate']:.2g}, held-out loss {best.metrics['loss']:.3f}")
    print(f"held-out accuracy, {RANKS} ranks: {best.metrics['accuracy']:.1%}")


def trial(config: dict[str, float]) -> None:
    """Train with one learning rate; Ray Tune runs it in a process of its own."""
    with RayExecutor(num_workers=RANKS) as executor:
        executor.start(Digits, executable_args=(config["rate"],))
        epoch = 0
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                state = torch.load(Path(folder, "state.pt"))
            epoch = executor.execute(lambda digits: digits.restore(state))[0]
        while epoch < config["epochs"]:
            loss, accuracy = executor.execute(lambda digits: digits.train_epoch())[0]
            epoch += 1
            with tempfile.TemporaryDirectory() as folder:
                torch.save(executor.execute_single(lambda digits: digits.state()), Path(folder, "state.pt"))
                metrics = {"loss": loss, "accuracy": accuracy, "epoch": epoch}
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


class Digits:
    """The rows, the network and the optimizer of one rank."""

    def __init__(self, rate: float) -> None:
        import sparkhvd.torch as hvd

        hvd.init()
        pixels, digit = load_digits(return_X_y=True)
        pixels, digit = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digit)
        self.train, self.held_out = (pixels[:1500], digit[:1500]), (pixels[1500:], digit[1500:])
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        self.optimizer = hvd.DistributedOptimizer(torch.optim.Adam(self.model.parameters(), lr=rate))
        self.rank, self.size = hvd.rank(), hvd.size()
        self.epoch = 0

    def train_epoch(self) -> tuple[float, float]:
        """Train on this rank's rows; return the loss and the accuracy of the held-out rows."""
        pixels, digit = self.train
        order = torch.randperm(len(digit), generator=torch.Generator().manual_seed(self.epoch))
        for step in order.split(BATCH * self.size)[:-1]:  # skips the last batch, which is smaller
            rows = step[self.rank :: self.size]
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(pixels[rows]), digit[rows]).backward()
            self.optimizer.step()
        self.epoch += 1
        with torch.no_grad():
            scores = self.model(self.held_out[0])
        loss = torch.nn.functional.cross_entropy(scores, self.held_out[1])
        return float(loss), float((scores.argmax(dim=1) == self.held_out[1]).float().mean())

    def state(self) -> dict[str, object]:
        return {"epoch": self.epoch, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, object]) -> int:
        """Resume from a checkpoint; return the number of its completed epochs."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        return self.epoch


if __name__ == "__main__":
    main()
