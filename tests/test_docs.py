"""What the documents show is run."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def code_blocks(document: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


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


def test_the_readme_has_both_commands_and_links_that_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for marker in ("run", "test"):
        assert re.search(rf"<!-- command: {marker} -->\n```bash\n.+\n```", readme)
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("http") or (ROOT / link).exists(), link
