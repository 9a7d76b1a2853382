"""The Python code blocks of README and guide run, page by page; links and tables of settings are right."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd.config import Config, from_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = sorted(
    str(page.relative_to(_ROOT))
    for page in [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
    if _BLOCK.search(page.read_text())
)


def test_readme_and_guide_have_code() -> None:
    assert {"README.md", "docs/index.md", "docs/guide/estimators.md", "docs/guide/run.md"} <= set(_PAGES)


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:.*only affects:UserWarning")
@pytest.mark.parametrize("page", _PAGES)
def test_code_blocks_run(page: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (_ROOT / page).read_text()
    # As in a script: functions that are sent to the ranks travel with their code.
    names: dict[str, object] = {"__name__": "__main__"}
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(_ROOT / page), "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (_ROOT / page).read_text())
    assert [target for target in targets if not (_ROOT / target).exists()] == []


def test_settings_page_lists_every_setting_with_its_default() -> None:
    page = (_ROOT / "docs/api/settings.md").read_text()
    rows = re.findall(r"^\| `(SPARKHVD_\w+)` \|[^|]*\| (\d+) \| `(\w+)` \|$", page, re.MULTILINE)
    assert {field for _, _, field in rows} == {field.name for field in fields(Config)}
    for variable, default, field in rows:
        assert getattr(from_environment({variable: "0"}), field) == 0, variable
        assert getattr(Config(), field) == float(default), variable
