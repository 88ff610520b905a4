"""Makes each notebook out of its text: `python notebooks/build.py [NAME.py ...]` runs the cells and writes the .ipynb.

The text in percent format is the source; the .ipynb is committed with its outputs, so that it can be read without
being run. A test holds the two together. Needs `pip install -e '.[notebook]'`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
# A bar without widgets is a bar all the same; the advice to install them is no part of the notebook.
_TQDM_WARNING = re.compile(r"^.*TqdmWarning:.*\n(?:  .*\n)*", re.MULTILINE)


def build(source: Path) -> Path:
    """Runs the cells of `source` in a fresh kernel; returns the path of the notebook written."""
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": FOLDER}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # otherwise random, and a difference at every build
        cell.metadata = {}
        cell.outputs = [_tidied(output) for output in cell.get("outputs", ()) if not _is_empty(_tidied(output))]
        if cell.cell_type == "markdown":
            del cell["outputs"]
    target = source.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


def _tidied(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without warnings about widgets and without the home of whoever built it."""
    if output.output_type == "stream":
        output.text = _TQDM_WARNING.sub("", output.text).replace(str(Path.home()), "~")
    return output


def _is_empty(output: nbformat.NotebookNode) -> bool:
    return output.output_type == "stream" and not output.text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, help="default: all")
    for source in parser.parse_args().sources or sorted(FOLDER.glob("[0-9]*.py")):
        target = build(source)
        sys.stdout.write(f"{target}: {target.stat().st_size / 1024:.0f} KB\n")


if __name__ == "__main__":
    main()
