"""The Python code blocks of README and guide run, page by page; links and tables of settings are correct."""

from __future__ import annotations

import gc
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.specifiers import SpecifierSet

import sparkhvd
from bench.plots import plots
from sparkhvd import KerasEstimator, LightningEstimator, TorchEstimator
from sparkhvd.compat import spark as versions
from sparkhvd.config import WITHOUT_EFFECT, Config, declarations, variable_of
from sparkhvd.estimators.lightning.retired import LIGHTNING_RETIRED
from sparkhvd.estimators.params.params import RETIRED
from tools.parameter_tables import on_page_markdown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the functions for the ranks may import; an estimator of the same framework can use the same warm process.
# PyTorch's optimizers import torch._dynamo, which must come before TensorFlow.
_IMPORTS = {
    "sparkhvd.torch": TorchEstimator.preload,
    "sparkhvd.lightning": ("torch._dynamo", "sparkhvd.lightning"),
    "sparkhvd.keras": ("sparkhvd.keras",),
}


def _frameworks(page: str) -> list[bool]:
    """Return which frameworks a page uses. Pages in this order find the warm process of their imports."""
    text = (_ROOT / page).read_text()
    names = [name.removeprefix("sparkhvd.") for name in _IMPORTS]
    return [f"    import sparkhvd.{name}" in text or f"{name.title()}Estimator(" in text for name in reversed(names)]


_PAGES = sorted(
    (
        str(page.relative_to(_ROOT))
        for page in [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
        if _BLOCK.search(page.read_text())
    ),
    key=lambda page: (_frameworks(page), page),
)


def test_readme_and_guide_contain_code() -> None:
    assert {"README.md", "docs/start.md", "docs/how-to/train-pytorch.md", "docs/how-to/run.md"} <= set(_PAGES)


@pytest.mark.spark
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.filterwarnings("ignore:.*only affects:UserWarning")
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")  # pyspark's CrossValidator
@pytest.mark.parametrize("page", _PAGES)
def test_code_blocks_run(page: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (_ROOT / page).read_text()
    # Fork the ranks from a process with the imports of their functions; importing would take most of the time.
    imports = [module for name in _IMPORTS if f"    import {name}" in text for module in _IMPORTS[name]]
    for run in (sparkhvd.run, sparkhvd.run_elastic):
        monkeypatch.setitem(inspect.unwrap(run).__kwdefaults__, "preload", tuple(imports))
    # Like in a script, so that functions are sent to the ranks with their code.
    names: dict[str, object] = {"__name__": "__main__"}
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(_ROOT / page), "exec"), names)
    gc.collect()  # closes the pool that pyspark does not close, with the warning


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_to_files_have_targets(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (_ROOT / page).read_text())
    assert [target for target in targets if not (_ROOT / target).exists()] == []


def test_lines_of_prose_have_at_most_100_characters() -> None:
    """Check lines outside code and tables: short lines read well in an editor, and a diff shows each change clearly."""
    pages = [page for page in sorted((_ROOT / "docs").rglob("*.md")) if page.parent.name != "adr"]
    long = []
    for page in pages:
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        long += [
            f"{page.relative_to(_ROOT)}: {line}"
            for line in prose.splitlines()
            if len(line) > 100 and not line.lstrip().startswith("|")
        ]
    assert long == []


def test_the_services_page_lists_the_supported_runtimes_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (_ROOT / "docs" / "platforms" / "services.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \| (\d[\d.]+) \| (\d\.\d+)(?: to [\d.]+)? \| (no: Python|yes.*?) \|", page, re.MULTILINE
    )
    assert len(rows) == 12
    requires = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    for runtime, spark, python, supported in rows:
        monkeypatch.setattr(versions, "pyspark_version", lambda spark=spark: spark)
        session: Any = SimpleNamespace(version=spark)
        versions.check_spark(session)
        assert SpecifierSet(requires).contains(python) == supported.startswith("yes"), runtime


def test_settings_page_matches_the_declarations() -> None:
    rows = [
        f"| `{variable_of(name)}` | {_names(each.readers)} | {_shown(getattr(Config(), name))} | {each.meaning} |"
        for name, each in declarations().items()
    ]
    assert _table_below("| variable | fallback | default | meaning |") == rows


def test_settings_page_lists_every_horovod_variable_without_effect() -> None:
    assert _table_below("| variable | why |") == [f"| `{name}` | {why} |" for name, why in WITHOUT_EFFECT.items()]


def test_the_migration_page_lists_every_retired_parameter_with_its_reason() -> None:
    rows = [f"| `{name}` | {what} |" for name, what in RETIRED.items()]
    rows += [f"| `{name}` of LightningEstimator | {what} |" for name, what in LIGHTNING_RETIRED.items()]
    assert _table_below("| Horovod | sparkhvd |", "docs/horovod/parameters.md") == rows


def test_the_plots_of_the_performance_page_show_the_results_of_the_benchmarks() -> None:
    folder = _ROOT / "docs" / "performance"
    drawn = plots()
    assert sorted(drawn) == sorted(path.name for path in folder.glob("*.svg"))
    stale = [name for name, picture in drawn.items() if (folder / name).read_text() != picture]
    assert stale == [], "python -m bench.plots draws them again"


def test_the_reference_lists_every_parameter_of_every_estimator() -> None:
    page = on_page_markdown((_ROOT / "docs" / "reference" / "parameters.md").read_text())
    estimators = (TorchEstimator, KerasEstimator, LightningEstimator)
    owners = Counter(name for estimator in estimators for name in estimator.declarations)
    rows = Counter(re.findall(r"^\| `(\w+)` \| .* \| .+ \|$", page, re.MULTILINE))
    assert rows == {name: 1 if count == len(estimators) else count for name, count in owners.items()}


def _table_below(head: str, page: str = "docs/reference/settings.md") -> list[str]:
    lines = (_ROOT / page).read_text().splitlines()
    below = lines[lines.index(head) + 2 :]
    return list(takewhile(lambda line: line.startswith("|"), below))


def _names(readers: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in readers)


def _shown(default: object) -> str:
    if default in (None, "", ()):
        return ""
    return f"{float(default):.12g}" if isinstance(default, int | float) else f"`{default}`"
