"""Notebooks: the committed .ipynb is its text, with outputs; and the text runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import matplotlib as mpl
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
QUICKSTART = FOLDER / "01_quickstart.py"
MAX_BYTES = 400_000


def cells_of(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def code_of(source: Path) -> list[str]:
    return [text for kind, text in cells_of(jupytext.read(source)) if kind == "code"]


def run(cells: list[str], names: dict[str, Any]) -> None:
    for number, text in enumerate(cells):
        exec(compile(text, f"code cell {number}", "exec"), names)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What has been shown: no window, and no setting of a plot outlives the test."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    with plt.rc_context():
        yield shown
    plt.close("all")


def test_there_is_a_quickstart() -> None:
    assert QUICKSTART in SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_its_text_with_the_outputs_of_one_run(source: Path) -> None:
    target = source.with_suffix(".ipynb")
    notebook = json.loads(target.read_text(encoding="utf-8"))
    remedy = f"run `python notebooks/build.py {source.name}`"
    assert cells_of(notebook) == cells_of(jupytext.read(source)), remedy
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), remedy
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "error" not in kinds
    assert target.stat().st_size <= MAX_BYTES


@pytest.mark.demo
def test_the_quickstart_runs_and_plots(
    demo_gguf: Path, figures: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CBJAX_DEMO_MODEL", str(demo_gguf))
    names: dict[str, Any] = {"__name__": "notebook"}
    run(code_of(QUICKSTART), names)
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out
    assert "0 programs compiled for this call" in out
    assert "12 finished" in out
    titles = [[axes.get_title() for axes in figure.axes if axes.get_title()] for figure in figures]
    assert titles == [
        ["Who holds which block (16 tokens each)"],
        ["Tokens computed", "Occupancy"],
        ["One prompt joins B - 1 decodes", "This run"],
    ]
    for axes in (axes for figure in figures for axes in figure.axes):
        assert axes.get_ylabel() or axes.get_title() == "This run"
    assert names["padding_waste"](8, 100) == 693
    assert names["useful"] <= names["slots"]["this run:\npacked, in buckets"]


@pytest.mark.parametrize(("device", "requirement"), [("tpu", "cbjax[tpu]"), ("gpu", "cbjax[cuda12]"), ("cpu", "cbjax")])
def test_the_first_cell_installs_on_colab_before_jax_is_imported(
    monkeypatch: pytest.MonkeyPatch, device: str, requirement: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] if device == "tpu" else [])
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if device == "gpu" else None)
    first, *rest = code_of(QUICKSTART)
    run([first], {})
    assert commands == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    with pytest.raises(RuntimeError, match="restart the session and run this cell first"):
        run([first], {})
    monkeypatch.delitem(sys.modules, "jax")
    run([first], {})
    assert commands == [[sys.executable, "-m", "pip", "install", "-q", requirement, "jax<0.12"]]
    assert "import jax" not in first
    assert "import jax" in rest[0]
