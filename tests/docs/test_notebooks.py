"""The notebooks of the tutorials run, and the outputs stored in them are those of a run."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from tools.notebook_pages import as_markdown
from tools.notebooks import execute, tidy

_ROOT = Path(__file__).parents[2]
_TUTORIALS = sorted((_ROOT / "docs" / "tutorials").glob("*.ipynb"))


def _kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    return [[output.output_type for output in cell.get("outputs", [])] for cell in notebook.cells]


def test_there_are_tutorials_for_tables_images_text_and_searches() -> None:
    assert [path.stem for path in _TUTORIALS] == ["images", "search", "table", "text"]


@pytest.fixture(scope="module")
def executed(warm_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, nbformat.NotebookNode]:
    """Return the notebooks after a run, by name.

    One kernel runs them all, so the frameworks are imported once and one JVM starts. The kernel is another process,
    which needs the library of this folder.
    """
    # Keras comes last: TensorFlow must be imported after the modules that PyTorch's optimizers import.
    paths = sorted(_TUTORIALS, key=lambda path: path.stem == "images")
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    joined = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        joined.cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]  # forgets the variables
    folder = tmp_path_factory.mktemp("notebooks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, str(folder / name))
        execute(joined, folder)  # stores the outputs in the cells of the notebooks
    return notebooks


@pytest.mark.spark
@pytest.mark.timeout(1200)  # the first of them runs all notebooks
@pytest.mark.parametrize("path", _TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_stores_the_outputs_of_every_cell(
    path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    stored = nbformat.read(path, as_version=4)
    now = tidy(executed[path.stem])
    assert _kinds(now) == _kinds(stored), f"python -m tools.notebooks {path.relative_to(_ROOT)} stores them again"
    shown = [output for cell in now.cells for output in cell.get("outputs", [])]
    if path.stem != "search":  # the trials of a search print nothing
        assert any("epoch 1/" in output.get("text", "") for output in shown)
    assert any("image/png" in output.get("data", {}) for output in shown), "the plot of the loss"


@pytest.mark.parametrize("path", _TUTORIALS, ids=lambda path: path.stem)
def test_the_page_of_a_tutorial_has_its_text_code_and_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    page = as_markdown(notebook)
    assert page.startswith(("# Train on ", "# Search parameters"))
    assert all(cell.source in page for cell in notebook.cells)
    assert path.stem == "search" or "[0]<stdout>:epoch 1/" in page
    assert "](data:image/png;base64," in page
    assert "<stderr>" not in page
    assert "/site-packages/" not in page
    lines = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    assert max(map(len, lines)) <= 100


def test_printed_lines_are_kept_without_progress_bars_and_logs() -> None:
    cell = nbformat.v4.new_code_cell("fit()")
    for name, text in [
        ("stdout", "\rrun:  50%|#####     | 1/2"),
        ("stdout", "\r          \r[0]<stdout>:epoch 1/2\n"),
        ("stdout", "[1]<stderr>:a warning\n"),
        ("stderr", "a log line\n"),
        ("stdout", "done\n"),
    ]:
        cell.outputs.append(nbformat.v4.new_output("stream", name=name, text=text))
    notebook = tidy(nbformat.v4.new_notebook(cells=[cell]))
    assert [output.text for output in notebook.cells[0].outputs] == ["[0]<stdout>:epoch 1/2\ndone\n"]
