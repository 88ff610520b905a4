"""What the documents show is run."""

import re
import shlex
from pathlib import Path

import numpy as np

from cbjax import cli
from cbjax.simulate import LinearCost

ROOT = Path(__file__).parent.parent


def code_blocks(document: str, language: str = "python") -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_example_of_a_module_of_ones_own_runs_and_its_own_check_holds(monkeypatch):
    (source,) = code_blocks("docs/your_own_model.md")
    assert "assert logits" in source
    names = {}
    exec(compile(source, "docs/your_own_model.md", "exec"), names)
    assert len(names["output"].generated_tokens) == 8
    names["lm"].close()


def test_the_example_of_a_manager_runs_and_its_own_checks_hold():
    (source,) = code_blocks("docs/manager.md")
    assert source.count("assert ") == 2
    names = {}
    exec(compile(source, "docs/manager.md", "exec"), names)
    assert [output.status.name for output in names["outputs"]] == ["FINISHED"] * 3
    assert names["lm"].manager is None
    names["lm"].close()


def test_the_example_of_a_measured_cost_runs_and_a_simulation_takes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (source,) = code_blocks("docs/sizing.md")
    assert source.count("assert ") == 1
    names = {}
    exec(compile(source, "docs/sizing.md", "exec"), names)
    assert min(names["cost"].buckets.values()) > 0
    assert LinearCost.from_json(Path("cost.json").read_text()) == names["cost"]
    assert names["lm"].manager is None
    names["lm"].close()
    Path("mine.csv").write_text("prompt_tokens,output_tokens\n20,5\n30,9\n")
    commands = [line for block in code_blocks("docs/sizing.md", "bash") for line in block.splitlines()]
    (command,) = [line for line in commands if "--cost" in line]
    assert cli.main(shlex.split(command)[1:]) == 0
    assert "2 of 2 completed" in capsys.readouterr().out
    for line in commands:
        assert cli.build_parser().parse_args(shlex.split(line)[1:]).command == "simulate"


def test_the_readme_has_both_commands_and_links_that_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for marker in ("run", "test"):
        assert re.search(rf"<!-- command: {marker} -->\n```bash\n.+\n```", readme)
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_the_kernels_page_calls_them_and_gets_what_attention_is():
    (source,) = code_blocks("docs/kernels.md")
    names = {}
    exec(compile(source, "docs/kernels.md", "exec"), names)
    q, k, v = (np.asarray(names[name], np.float64) for name in "qkv")
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(2, axis=1)) / np.sqrt(128)
    scores[:, ~np.tri(35, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v.repeat(2, axis=1))
    np.testing.assert_allclose(names["out"], expected, atol=2e-5)
