"""Draw the plots of the documentation from the results in bench/results, as SVG files.

Drawing needs no library. The plots follow the reader's light or dark theme. Equal results give equal files.

    python -m bench.plots
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FOLDER = ROOT / "docs" / "performance"

OURS, VARIANT, PEER, BOUND = "ours", "variant", "peer", "bound"  # the meaning of a bar, which sets its color
WIDTH, LABELS, VALUES, BAR, GAP = 680, 250, 70, 22, 6

STYLE = """<style>
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2430; }
.title { font-size: 15px; font-weight: 600; }
.group { fill: #4a5163; font-weight: 600; }
.ours { fill: #4051b5; }
.variant { fill: #8c9eff; }
.peer { fill: #e08e2b; }
.bound { fill: #9aa1b5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8f0; }
  .group { fill: #aab1c6; }
  .ours { fill: #7f8ff4; }
  .variant { fill: #4f5fb8; }
}
</style>"""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value and its meaning."""

    label: str
    value: float
    kind: str


@dataclass(frozen=True)
class Group:
    """Bars under one heading; the heading may be empty."""

    heading: str
    bars: Sequence[Bar]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, plot in plots().items():
        (FOLDER / name).write_text(plot)
        print(FOLDER / name)


def plots() -> dict[str, str]:
    """Return the plots by file name."""
    return {
        "startup.svg": draw("Start ranks that import torch: seconds, lower is better", startup()),
        "fit.svg": draw("Train on 200,000 rows: seconds, lower is better", fit()),
        "transform.svg": draw("Predict 200,000 rows: seconds, lower is better", transform()),
        "reading.svg": draw("Read Parquet: speed relative to a bare scan, higher is better", reading()),
        "writing.svg": draw("Bring 1,000,000 rows to the ranks: seconds, lower is better", writing()),
        "allreduce.svg": draw("Allreduce of two processes on one host: GB/s, higher is better", allreduce()),
        "scaling.svg": draw("Weak-scaling efficiency at 25 Gbit/s, simulated: higher is better", scaling()),
        "strong.svg": draw("Strong-scaling efficiency at 25 Gbit/s, simulated: higher is better", strong()),
        "exchanges.svg": draw("Efficiency by way of exchange at 25 Gbit/s, simulated: higher is better", exchanges()),
        "stragglers.svg": draw(
            "Wait for the last rank in a step, simulated: milliseconds, lower is better", stragglers()
        ),
        "network.svg": draw("Allreduce between two hosts over TCP: milliseconds, lower is better", network()),
    }


def startup() -> list[Group]:
    text = _result("startup")
    kinds = {"barrier": OURS, "local": VARIANT, "TorchDistributor": PEER}
    groups = []
    for ranks, table in re.findall(r"^(\d+) ranks, torch: .*\n((?:  .*\n)+)", text, re.MULTILINE):
        bars = [Bar(name, _after(table, name), kind) for name, kind in kinds.items()]
        groups.append(Group(f"{ranks} ranks", bars))
    return groups


def fit() -> list[Group]:
    text = _result("estimators")
    ways = {
        "TorchEstimator, through a Store": OURS,
        "TorchEstimator, direct": VARIANT,
        "by hand: Parquet, TorchDistributor, DDP, pyarrow": PEER,
    }
    return [Group("", [Bar(name.partition(":")[0], _after(text, name), kind) for name, kind in ways.items()])]


def transform() -> list[Group]:
    text = _result("estimators")
    ways = {"TorchModel.transform": OURS, "predict_batch_udf": PEER}
    return [Group("", [Bar(name, _after(text, name), kind) for name, kind in ways.items()])]


def reading() -> list[Group]:
    readers = {"ours": OURS, "ours, shuffled": VARIANT, "bare scan": BOUND, "petastorm": PEER}
    groups = []
    for heading, table in re.findall(r"^(.*): rows per second\n((?:  .*\n)+)", _result("data"), re.MULTILINE):
        speed = {name: _after(table, name) for name in readers}
        bars = [
            Bar(name.replace("ours", "sparkhvd"), speed[name] / speed["bare scan"], kind)
            for name, kind in readers.items()
        ]
        groups.append(Group(heading, bars))
    return groups


def writing() -> list[Group]:
    text = _result("data")
    ways = {"df.write.parquet": BOUND, "prepare_data": OURS, "direct path": VARIANT}
    return [Group("", [Bar(name, _after(text, name), kind) for name, kind in ways.items()])]


def allreduce() -> list[Group]:
    table = _part(_result("collectives"), r"allreduce, sum, in place, 2 processes")
    head, *rows = (line.split() for line in table.splitlines()[2:])
    engine, limit = (head.index(name) - 1 for name in ("engine", "limit"))  # "bytes each" is split in two
    groups = []
    for row in rows:
        size = int(row[0])
        if size >= 2**20:
            bars = [Bar("sparkhvd", float(row[engine]), OURS), Bar("limit of the memory", float(row[limit]), BOUND)]
            groups.append(Group(f"{size // 2**20} MiB", bars))
    return groups


def network() -> list[Group]:
    groups = []
    for link in ("unlimited", "1 Gbit/s"):
        table = _part(_result("network"), rf"over TCP, 2 hosts, {link}")
        for row in (line.split() for line in table.splitlines()[3:]):
            size, ours, gloo = int(row[0]), float(row[1]), float(row[2])
            if size >= 2**24:
                bars = [Bar("sparkhvd", ours, OURS), Bar("Gloo", gloo, PEER)]
                groups.append(Group(f"{size // 2**20} MiB, {link}", bars))
    return groups


def scaling() -> list[Group]:
    table = _part(_result("simulate"), r"weak scaling, ")
    rows = re.findall(r"^(\S.*?)  +(\d+) +(\d+) +\d+% +(\d+)%", table, re.MULTILINE)
    shares = {(model, int(hosts), int(gpus)): int(share) / 100 for model, hosts, gpus, share in rows}
    groups = []
    for model in dict.fromkeys(model for model, *_ in shares):
        bars = [
            Bar(f"{gpus} GPUs, {gpus // hosts} per host", share, OURS)
            for (name, hosts, gpus), share in shares.items()
            if name == model
        ]
        groups.append(Group(model, bars))
    return groups


def strong() -> list[Group]:
    table = _part(_result("simulate"), r"strong scaling, ")
    rows = re.findall(r"^(\S.*?)  +(\d+) +(\d+) +\d+% +(\d+)%", table, re.MULTILINE)
    groups: dict[str, list[Bar]] = {}
    for model, gpus, images, share in rows:
        groups.setdefault(model, []).append(Bar(f"{gpus} GPUs, {images} images each", int(share) / 100, OURS))
    return [Group(model, bars) for model, bars in groups.items()]


def exchanges() -> list[Group]:
    _, _, head, *rows = _part(_result("simulate"), r"ways to exchange gradients, ").splitlines()
    names = re.split(r" {2,}", head.strip())[2:]
    groups = []
    for row in rows:
        model, gpus, *shares = re.split(r" {2,}", row.strip())
        if gpus == "512":
            bars = [Bar(name, int(share.rstrip("%")) / 100, OURS) for name, share in zip(names, shares, strict=True)]
            groups.append(Group(f"{model}, {gpus} GPUs", bars))
    return groups


def stragglers() -> list[Group]:
    table = _part(_result("simulate"), r"steps with an exponential delay")
    groups = []
    for ranks, simulated, expected in re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", table, re.MULTILINE):
        bars = [Bar("simulated", float(simulated), OURS), Bar("expected maximum", float(expected), BOUND)]
        groups.append(Group(f"{ranks} ranks", bars))
    return groups


def draw(title: str, groups: Sequence[Group]) -> str:
    """Return horizontal bars as an SVG. All bars start at zero and have the same scale."""
    scale = (WIDTH - LABELS - VALUES) / max(bar.value for group in groups for bar in group.bars)
    lines = [f"<title>{escape(title)}</title>", _text(0, 18, title, "title")]
    y = 34
    for group in groups:
        if group.heading:
            lines.append(_text(0, y + 14, group.heading, "group"))
            y += 22
        for bar in group.bars:
            width = max(1.0, bar.value * scale)
            lines.append(_text(LABELS - 8, y + 16, bar.label, anchor="end"))
            lines.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" class="{bar.kind}"/>')
            lines.append(_text(round(LABELS + width + 6, 1), y + 16, f"{bar.value:.3g}"))
            y += BAR + GAP
        y += 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
    return "\n".join([head, STYLE, *lines, "</svg>", ""])


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def _result(name: str) -> str:
    return (RESULTS / f"{name}.txt").read_text()


def _part(text: str, heading: str) -> str:
    """Return the table below a heading, including the line of the heading."""
    match = re.search(rf"^.*{heading}.*\n\n(?:.+\n)+", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"The results have no table {heading!r}.")
    return match[0]


def _after(table: str, label: str) -> float:
    """Return the first number of the row with this label."""
    match = re.search(rf"^  {re.escape(label)} {{2,}}([\d.,]+)", table, re.MULTILINE)
    if match is None:
        raise ValueError(f"The results have no row {label!r}.")
    return float(match[1].replace(",", ""))


if __name__ == "__main__":
    main()
