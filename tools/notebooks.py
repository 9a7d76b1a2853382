"""Run the notebooks of the documentation and store their outputs, for readers who do not run them.

    python -m tools.notebooks docs/tutorials/*.ipynb

Spark needs Java: see tools/java-home.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_NOT_SHOWN = re.compile(r"\d+%\||\[\d+\]<stderr>:")  # progress bars of tqdm, and log lines of the ranks


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in the folder, and return it with its new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    client = NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    asyncio.run(client.async_execute())  # also closes its event loop
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Join the printed lines of every cell, and remove progress bars, logs and the times of execution."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        shown = [output for output in cell.outputs if output.output_type != "stream"]
        lines = [line.rpartition("\r")[2].rstrip() for line in printed.replace("\r\n", "\n").split("\n")]
        text = "".join(f"{line}\n" for line in lines if line and not _NOT_SHOWN.search(line))
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        cell.outputs += shown
    return notebook


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(tidy(execute(nbformat.read(path, as_version=4), Path(folder))), path)


if __name__ == "__main__":
    main(sys.argv[1:])
