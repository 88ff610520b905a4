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

from cbjax.scheduler import EVICTION_MAPPING

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
QUICKSTART, PRESSURE = FOLDER / "01_quickstart.py", FOLDER / "02_kv_pressure.py"
SIZING, ASYNC = FOLDER / "03_sizing.py", FOLDER / "04_async.py"
KERNELS = FOLDER / "05_kernels.py"
MAX_BYTES = 400_000


def cells_of(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def code_of(source: Path) -> list[str]:
    return [text for kind, text in cells_of(jupytext.read(source)) if kind == "code"]


def imports_of(cells: list[str]) -> set[str]:
    """Top-level modules."""
    lines = [line.split() for text in cells for line in text.splitlines()]
    return {words[1].partition(".")[0] for words in lines if words[:1] in (["import"], ["from"])}


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


def titles_of(figures: list[Any]) -> list[list[str]]:
    return [[axes.get_title() for axes in figure.axes if axes.get_title()] for figure in figures]


def test_the_notebooks_are_these() -> None:
    assert SOURCES == [QUICKSTART, PRESSURE, SIZING, ASYNC, KERNELS]


each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@each_notebook
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
    assert titles_of(figures) == [
        ["Who holds which block (16 tokens each)"],
        ["Tokens computed", "Occupancy"],
        ["One prompt joins B - 1 decodes", "This run"],
    ]
    for axes in (axes for figure in figures for axes in figure.axes):
        assert axes.get_ylabel() or axes.get_title() == "This run"
    assert names["padding_waste"](8, 100) == 693
    assert names["useful"] <= names["slots"]["this run:\npacked, in buckets"]


def test_the_notebook_on_kv_pressure_runs_and_its_pictures_are_what_happened(
    figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    run(code_of(PRESSURE), names)
    captured = capsys.readouterr()
    assert captured.err == ""
    runs, pressure, few_shot = names["runs"], names["pressure"], names["few_shot"]

    evictions = [summary.soft_resets for _, _, summary in runs.values()]
    assert evictions == sorted(evictions, reverse=True)
    assert evictions[0] > evictions[-1] == 0
    assert titles_of(figures) == [
        ["The pool at step 30: 24 blocks of 8 tokens"],
        [
            f"safety_margin={margin}: {run.soft_resets} evictions, {run.recomputed_tokens} tokens computed again, "
            f"{len(steps)} steps"
            for margin, (_, steps, run) in runs.items()
        ],
        ["Who runs when: soft reset", "Who runs when: offload"],
        ["allow_block_sharing=False", "allow_block_sharing=True"],
        ["At the fork", "When the first is about to end"],
    ]
    for axes, (_, steps, _) in zip(figures[1].axes[::2], runs.values(), strict=True):
        shows_the_pool(axes, steps)
    for axes, (_, steps, _) in zip(figures[3].axes, few_shot.values(), strict=True):
        shows_the_pool(axes, steps)

    reset, offload = (summary for _, _, summary in pressure.values())
    assert reset.recomputed_tokens > offload.recomputed_tokens == 0
    assert offload.copied_bytes > reset.copied_bytes == 0
    for axes, (outputs, _, _) in zip(figures[2].axes, pressure.values(), strict=True):
        shows_who_computed(axes, list(outputs.values()))

    apart, together = ([o.num_cached_tokens for o in outputs.values()] for outputs, _, _ in few_shot.values())
    common = (1 + len(names["examples"])) // names["BLOCK_SIZE"] * names["BLOCK_SIZE"]
    assert (apart, together) == ([0] * 8, [0] + [common] * 7)
    assert "copied: block 2 to 3, block 2 to 4, block 2 to 5" in captured.out


def shows_the_pool(axes: Any, steps: list[Any]) -> None:
    """As many free blocks in each column as the scheduler counted, and a cross for each block that a victim lost."""
    image = axes.images[0].get_array()
    assert (image <= 1).sum(axis=0).tolist() == [step.state.pool.num_free for step in steps]
    assert (image == 1).sum(axis=0).tolist() == [step.state.pool.num_cached for step in steps]
    crosses = sum(len(line.get_xdata()) for line in axes.lines)
    assert crosses == sum(reset.num_blocks for step in steps for reset in step.plan.soft_resets)


def shows_who_computed(axes: Any, outputs: list[Any]) -> None:
    """A request's row has a step for each token but those that the end of a prefill gave, and a cross per eviction."""
    crosses = [row for line in axes.lines for row in line.get_ydata()]
    for row, output in enumerate(outputs):
        image = axes.images[0].get_array()[row]
        evictions = output.num_soft_resets + output.num_offloads
        assert crosses.count(row) == evictions
        prefills = 1 + evictions
        assert len(output.generated_tokens) - prefills <= (image == 3).sum() < len(output.generated_tokens)


def test_the_notebook_on_sizing_runs_and_its_pictures_show_its_runs(
    figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    run(code_of(SIZING), names)
    out = capsys.readouterr().out
    workloads = ["chat", "agents", "reasoning"]
    assert titles_of(figures) == [
        workloads,
        workloads,
        ["short requests, 600 steps", "long requests, 600 steps"],
        ["Blocks held, 40 long requests"],
        ["agents", "few_shot"],
    ]
    for name, results in names["by_pool"].items():
        # Everybody is served in every pool; the smallest evicts those who grow, the largest nobody, who waits least.
        assert all(result.completed == result.requests for result in results)
        assert (results[0].evictions > 0) == (name != "agents")
        assert results[-1].evictions == 0
        waits = [names["first_token"](result) for result in results]
        assert waits[-1] == min(waits) < waits[0] == max(waits)
    for results in names["by_margin"].values():
        assert results[0].evictions >= results[-1].evictions
        assert names["first_token"](results[-1]) > names["first_token"](results[0])
    for figure, kind in zip(figures, ("by_pool", "by_margin"), strict=False):
        drawn = [axes.lines[0].get_ydata().tolist() for axes in figure.axes[:3]]
        assert drawn == [[result.evictions for result in results] for results in names[kind].values()]
    assert [len(axes.lines) for axes in figures[4].axes] == [len(EVICTION_MAPPING)] * 2

    # The published figures of the loss model.
    for cells in ("(120, 9, 187)", "(96, 0, never)", "(83, 59, 187)", "(33, 13, 212)"):
        assert cells in out
    evictions = [run.evictions for run in names["cures"].values()]
    assert evictions[0] > evictions[1] > evictions[2] == 0
    assert f"the smallest of these: {names['smallest']} blocks" in out


def test_the_notebook_on_the_asynchronous_loop_runs_and_draws_what_was_recorded(
    figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    run(code_of(ASYNC), names)
    out = capsys.readouterr().out
    assert "the same tokens every time" in out
    assert titles_of(figures) == [["sync", "async", "windows"], ["Device at work, every run", "Throughput, every run"]]
    for axes, (mode, repeats) in zip(figures[0].axes, names["runs"].items(), strict=True):
        spans, timeline, _ = repeats[0]
        drawn = {bars.get_label(): bars for bars in axes.collections}
        assert len(drawn["device"].get_paths()) == len(spans) == timeline.num_steps
        assert len(drawn["plans"].get_paths()) == 2 * timeline.num_steps
        assert (timeline.steps["window"].max() > 1) == (mode == "windows")
    for shown, repeats in zip(figures[1].axes[0].lines, names["runs"].values(), strict=True):
        assert shown.get_xdata().tolist() == [100 * names["active_fraction"](spans) for spans, _, _ in repeats]
        assert all(0 < x <= 100 for x in shown.get_xdata())


@each_notebook
@pytest.mark.parametrize(("device", "requirement"), [("tpu", "cbjax[tpu]"), ("gpu", "cbjax[cuda12]"), ("cpu", "cbjax")])
def test_the_first_cell_installs_on_colab_before_jax_is_imported(
    monkeypatch: pytest.MonkeyPatch, source: Path, device: str, requirement: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] if device == "tpu" else [])
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if device == "gpu" else None)
    first, *rest = code_of(source)
    run([first], {})
    assert commands == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    with pytest.raises(RuntimeError, match="restart the session and run this cell first"):
        run([first], {})
    monkeypatch.delitem(sys.modules, "jax")
    run([first], {})
    assert commands == [[sys.executable, "-m", "pip", "install", "-q", requirement, "jax<0.12"]]
    assert "import jax" not in first
    # The notebook on sizing needs the scheduler and nothing else.
    assert ("import jax" in rest[0]) == (source != SIZING)
    assert source != SIZING or "jax" not in imports_of(rest)


def test_the_notebook_on_kernels_runs_and_draws_the_table(
    figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    run(code_of(KERNELS), names)
    table, chips = names["table"], names["chips"]
    out = capsys.readouterr().out
    assert "no TPU here, but a cpu: nothing is measured" in out
    assert len(out.splitlines()) == 1 + len(table)
    assert titles_of(figures) == [chips, ["Llama-3-8B, blocks of 128"]]
    drawn = [line for axes in figures[0].axes for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(drawn) == sum(entry["block_size"] in (16, 128) for entry in table)
    for line in drawn:  # no kernel is faster than its memory
        assert min(line.get_ydata()) >= min(entry["memory_us"][-1] for entry in table)
    assert len(figures[1].axes[0].lines) == len(chips)
