"""MkDocs hook: turn the notebooks below ``docs/`` into pages with their stored outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page


class NotebookFile(File):
    """A notebook that becomes a page; MkDocs would otherwise copy the file unchanged."""

    def is_documentation_page(self) -> bool:
        """Return True, because a notebook is a page."""
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Turn notebooks into pages."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(NotebookFile(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(*, page: Page, config: MkDocsConfig) -> str | None:  # noqa: ARG001  (MkDocs passes it)
    """Return the page's Markdown if it is a notebook."""
    path = page.file.abs_src_path
    if path is None or not path.endswith(".ipynb"):
        return None
    return as_markdown(nbformat.read(path, as_version=4))


def as_markdown(notebook: nbformat.NotebookNode) -> str:
    """Return the text, code and stored outputs of a notebook as Markdown."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += map(_output, cell.outputs)
    return "\n\n".join(parts) + "\n"


def _output(output: nbformat.NotebookNode) -> str:
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    image = output.data.get("image/png")
    if image is not None:
        return f"![Output of the cell](data:image/png;base64,{''.join(image.split())})"
    return f"```text\n{output.data['text/plain'].rstrip()}\n```"
