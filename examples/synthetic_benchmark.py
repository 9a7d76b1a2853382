"""Measure the images per second of a network on synthetic data, which needs no input pipeline.

Compare several ranks with one rank to see the cost of exchanging gradients. Compare your own training with this one to
see whether its input is slow. Options and output are those of Horovod's benchmarks of the same name;
``scaling_study.py`` runs this one with several numbers of ranks.

python examples/synthetic_benchmark.py --num-proc 2
python examples/synthetic_benchmark.py --num-proc 2 --framework keras --model vgg16
sparkhvdrun -np 2 python examples/synthetic_benchmark.py --launcher none
mpirun -np 2 python examples/synthetic_benchmark.py --launcher none
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import sparkhvd

# The number of blocks in each level, and whether a block is a bottleneck.
_RESNETS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}
# The convolutions of VGG-16: multiples of the width of the first layer; 0 halves the image.
_VGG = (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)
_VGG_DENSE = 64  # the width of the two dense layers, as a multiple of the width of the first layer
MODELS = (*_RESNETS, "vgg16")


@dataclass(frozen=True)
class Options:
    """The settings of a rank."""

    framework: str = "torch"
    model: str = "resnet18"
    batch_size: int = 32
    image_size: int = 64
    width: int = 64
    num_classes: int = 1000
    warmup_batches: int = 3
    batches: int = 5
    iterations: int = 5
    backward_passes_per_step: int = 1
    local_steps: int = 0
    fp16_allreduce: bool = False
    use_adasum: bool = False
    threads: int = 1
    cuda: bool = False


# Ways to exchange gradients, as changes of the options.
EXCHANGES: dict[str, dict[str, Any]] = {
    "average": {},
    "fp16": {"fp16_allreduce": True},
    "adasum": {"use_adasum": True},
    "every 4th": {"backward_passes_per_step": 4},
    "local SGD": {"local_steps": 4},
    "none": {"local_steps": 1_000_000},  # no rank waits for another: the speed of the processors alone
}

# The arguments of the command line: the field of the options, and a description.
_ARGUMENTS = {
    "--framework": ("framework", "the package that trains"),
    "--model": ("model", "the network"),
    "--batch-size": ("batch_size", "images per rank and batch"),
    "--image-size": ("image_size", "height and width of an image"),
    "--width": ("width", "channels of the first layer; the published networks have 64"),
    "--num-classes": ("num_classes", "outputs of the last layer"),
    "--num-warmup-batches": ("warmup_batches", "batches before the timed ones"),
    "--num-batches-per-iter": ("batches", "batches per timed iteration"),
    "--num-iters": ("iterations", "number of timed iterations"),
    "--backward-passes-per-step": (
        "backward_passes_per_step",
        "batches whose gradients a rank adds before an exchange",
    ),
    "--local-steps": (
        "local_steps",
        "steps after which the ranks average their weights instead of exchanging gradients (local SGD); 0 turns it off",
    ),
    "--fp16-allreduce": ("fp16_allreduce", "send gradients as float16"),
    "--use-adasum": ("use_adasum", "combine gradients by Adasum"),
    "--threads": ("threads", "threads of the framework on each rank"),
    "--cuda": ("cuda", "train on the GPU with the index of the local rank"),
}
_CHOICES = {"framework": ("torch", "keras"), "model": MODELS}


def images_per_second(options: Options) -> list[float]:
    """Return the speed of this rank in each iteration; runs on every rank."""
    train = _torch_training(options) if options.framework == "torch" else _keras_training(options)

    def speed(batches: int) -> float:
        images = options.batch_size * batches * options.backward_passes_per_step
        start = time.perf_counter()
        train(batches)
        return images / (time.perf_counter() - start)

    speed(options.warmup_batches)
    return [speed(options.batches) for _ in range(options.iterations)]


def _torch_training(options: Options) -> Any:
    """Return a function that trains the network of PyTorch for a number of batches."""
    import torch

    import sparkhvd.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda", hvd.local_rank()) if options.cuda else torch.device("cpu")
    model = torch_network(options.model, options.width, options.num_classes, options.image_size).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if not options.local_steps:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=options.backward_passes_per_step,
            op=hvd.Adasum if options.use_adasum else hvd.Average,
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(options.num_classes, (options.batch_size,), device=device)

    steps = itertools.count(1)

    def average_weights() -> None:
        hvd.grouped_allreduce_([parameter.data for parameter in model.parameters()], name="weights")

    def train(batches: int) -> None:
        for _ in range(batches):
            optimizer.zero_grad()
            for _ in range(options.backward_passes_per_step):
                torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if options.local_steps and next(steps) % options.local_steps == 0:
                average_weights()
        if options.cuda:
            torch.cuda.synchronize()

    return train


def torch_network(model: str, width: int, classes: int, image_size: int) -> Any:
    """Return a network of PyTorch with ``width`` channels in its first layer; the originals have 64."""
    from torch import nn

    if model == "vgg16":
        layers: list[nn.Module] = []
        channels = 3
        for factor in _VGG:
            if factor == 0:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
                channels = factor * width
        features = channels * (image_size // 32) ** 2
        layers.append(nn.Flatten())
        for _ in range(2):
            layers += [nn.Linear(features, _VGG_DENSE * width), nn.ReLU(), nn.Dropout(0.5)]
            features = _VGG_DENSE * width
        return nn.Sequential(*layers, nn.Linear(features, classes))

    class Block(nn.Module):
        """Two or three convolutions and a shortcut around them."""

        def __init__(self, before: int, inner: int, after: int, stride: int, bottleneck: bool) -> None:
            super().__init__()
            # Kernel size and stride of each convolution.
            shapes = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
            layers: list[nn.Module] = []
            channels = before
            for index, (kernel, step) in enumerate(shapes):
                last = index == len(shapes) - 1
                out = after if last else inner
                layers += [nn.Conv2d(channels, out, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(out)]
                layers += [] if last else [nn.ReLU()]
                channels = out
            self.convolutions = nn.Sequential(*layers)
            same = before == after and stride == 1
            projection = () if same else (nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            self.shortcut = nn.Sequential(*projection)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.convolutions(x) + self.shortcut(x))

    blocks, bottleneck = _RESNETS[model]
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for level, number in enumerate(blocks):
        inner = width * 2**level
        after = inner * 4 if bottleneck else inner
        for index in range(number):
            layers.append(Block(before, inner, after, 2 if level > 0 and index == 0 else 1, bottleneck))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def _keras_training(options: Options) -> Any:
    """Return a function that trains the network of Keras for a number of batches."""
    import keras
    import numpy as np

    import sparkhvd.keras as hvd
    import sparkhvd.numpy as arrays

    hvd.init()
    _use_devices(keras.backend.backend(), hvd.local_rank(), options)
    keras.utils.set_random_seed(0)
    model = keras_network(options.model, options.width, options.num_classes, options.image_size)
    optimizer = keras.optimizers.SGD(0.01)
    if not options.local_steps:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=options.backward_passes_per_step,
            op=hvd.Adasum if options.use_adasum else hvd.Average,
        )
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    shape = (options.batch_size, options.image_size, options.image_size, 3)
    batch = random.standard_normal(shape, dtype=np.float32), random.integers(options.num_classes, size=shape[0])
    steps = itertools.count(1)

    def average_weights(*_: Any, **__: Any) -> None:
        if options.local_steps and next(steps) % options.local_steps == 0:
            weights = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_weights]
            means = arrays.grouped_allreduce(weights, name="weights")
            for weight, mean in zip(model.trainable_weights, means, strict=True):
                weight.assign(mean)

    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]  # gives all ranks the same weights

    def train(batches: int) -> None:
        passes = batches * options.backward_passes_per_step
        callbacks = [*first, keras.callbacks.LambdaCallback(on_train_batch_end=average_weights)]
        model.fit(_repeated(batch), steps_per_epoch=passes, callbacks=callbacks, shuffle=False, verbose=0)
        first.clear()

    return train


def _repeated(batch: Any) -> Any:
    while True:
        yield batch


def _use_devices(backend: str, local_rank: int, options: Options) -> None:
    """Let this rank use its own GPU, or the given number of threads."""
    if backend == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU") if options.cuda else []
        tf.config.set_visible_devices(gpus[local_rank : local_rank + 1], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    elif backend == "torch":
        import torch

        torch.set_num_threads(options.threads)


def keras_network(model: str, width: int, classes: int, image_size: int) -> Any:
    """Return a network of Keras with ``width`` channels in its first layer; the originals have 64."""
    from keras import Input, Model, layers

    def convolution(x: Any, channels: int, kernel: int, stride: int = 1) -> Any:
        return layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False)(x)

    image = Input((image_size, image_size, 3))
    x: Any = image
    if model == "vgg16":
        for factor in _VGG:
            layer = layers.Conv2D(factor * width, 3, padding="same", activation="relu") if factor else None
            x = layers.MaxPooling2D(2)(x) if layer is None else layer(x)
        x = layers.Flatten()(x)
        for _ in range(2):
            x = layers.Dropout(0.5)(layers.Dense(_VGG_DENSE * width, activation="relu")(x))
        return Model(image, layers.Dense(classes)(x))
    blocks, bottleneck = _RESNETS[model]
    x = layers.ReLU()(layers.BatchNormalization()(convolution(x, width, 7, 2)))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for level, number in enumerate(blocks):
        inner = width * 2**level
        after = inner * 4 if bottleneck else inner
        for index in range(number):
            stride = 2 if level > 0 and index == 0 else 1
            shapes = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
            same = x.shape[-1] == after and stride == 1
            shortcut = x if same else layers.BatchNormalization()(convolution(x, after, 1, stride))
            for kernel, step in shapes[:-1]:
                x = layers.ReLU()(layers.BatchNormalization()(convolution(x, inner, kernel, step)))
            x = layers.BatchNormalization()(convolution(x, after, shapes[-1][0]))
            x = layers.ReLU()(layers.Add()([x, shortcut]))
    return Model(image, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def report(options: Options, speeds: list[list[float]]) -> str:
    """Return the speeds as Horovod's benchmarks print them: means over the iterations +- 1.96 standard deviations.

    Args:
        options: the settings of the ranks.
        speeds: for each rank, the images per second in each iteration.
    """
    device = "GPU" if options.cuda else "CPU"
    means = [statistics.fmean(iteration) for iteration in zip(*speeds, strict=True)]
    lines = [f"Iter #{index}: {mean:.1f} img/sec per {device}" for index, mean in enumerate(means)]
    slowest = min(range(len(speeds)), key=lambda rank: statistics.fmean(speeds[rank]))
    if len(speeds) > 1:
        lines.append(f"Slowest rank: {slowest}, {statistics.fmean(speeds[slowest]):.1f} img/sec")
    mean, spread = statistics.fmean(means), 1.96 * statistics.pstdev(means)
    lines.append(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    total, spread = len(speeds) * mean, len(speeds) * spread
    return "\n".join([*lines, f"Total img/sec on {len(speeds)} {device}(s): {total:.1f} +-{spread:.1f}"])


def main() -> None:
    options, arguments = _arguments()
    if arguments.launcher == "none":  # this process is already a rank, or the only one
        import sparkhvd.numpy as hvd

        speeds = hvd.allgather_object(images_per_second(options))
        if hvd.rank() == 0:
            print(report(options, speeds))
        hvd.shutdown()
    elif arguments.launcher == "local":
        speeds = sparkhvd.run(images_per_second, args=(options,), num_proc=arguments.num_proc, launcher="local")
        print(report(options, speeds))
    else:
        spark = spark_session(f"local[{arguments.num_proc}]")
        print(report(options, sparkhvd.run(images_per_second, args=(options,), num_proc=arguments.num_proc)))
        spark.stop()


def spark_session(master: str) -> Any:
    """Return the session of ``spark-submit``; without one, a session on this machine."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    if not SparkConf().contains("spark.master"):
        builder = builder.master(master)
    return builder.getOrCreate()


def _arguments() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument(
        "--launcher", choices=["local", "spark", "none"], default="local", help="how to start the ranks"
    )
    add_options(parser)
    arguments = parser.parse_args()
    return options_of(arguments), arguments


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that set ``Options``."""
    for name, (field, what) in _ARGUMENTS.items():
        default = getattr(Options(), field)
        if isinstance(default, bool):
            parser.add_argument(name, dest=field, action="store_true", help=what)
        else:
            parser.add_argument(
                name, dest=field, type=type(default), default=default, choices=_CHOICES.get(field), help=what
            )


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the settings that the arguments of ``add_options`` describe."""
    return Options(**{field: getattr(arguments, field) for field, _ in _ARGUMENTS.values()})


def arguments_of(options: Options) -> list[str]:
    """Return arguments of a command line that set these options."""
    arguments: list[str] = []
    for name, (field, _) in _ARGUMENTS.items():
        value = getattr(options, field)
        if isinstance(value, bool):
            arguments += [name] if value else []
        else:
            arguments += [name, str(value)]
    return arguments


if __name__ == "__main__":
    main()
