"""The shape of the packages: who may import whom, what stays light, how long a module may be."""

import ast
import functools
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("cbjax", "pallas_kernels") for path in (ROOT / package).rglob("*.py"))
HEAVY = ("jax", "jaxlib", "flax", "orbax", "gguf", "tokenizers", "huggingface_hub", "safetensors", "jinja2", "tqdm")
FOREIGN = ("torch", "transformers", "tensorflow")

# A unit is a top-level module or package of cbjax; beside it stands all that it may import of ours. The order is that
# of design.md: command line, user's object, session, engine and programs, step, then what a step is made of.
MAY_IMPORT = {
    "__init__": set(),  # public names are imported when they are first used
    "__main__": {"cli"},
    "cli": {"__init__", "causal_lm", "config", "ladder", "paths", "recording", "scheduler", "simulate"},
    "calibration": {"config", "progress", "simulate", "step_record", "strict"},
    "causal_lm": {"attention", "checkpoints", "config", "mixin", "models", "step", "strict"},
    "testing": {"causal_lm", "descriptor", "models", "scheduler", "text"},
    "mixin": {
        "config",
        "inputs",
        "job",
        "manager",
        "progress",
        "recording",
        "requests",
        "resolve",
        "session",
        "step_record",
        "summary",
        "text",
        "timeline",
        "tracing",
    },
    "job": {"config", "engine", "inputs", "requests", "sampling", "session", "submission", "summary"},
    "manager": {"config", "engine", "inputs", "requests", "sampling", "session", "strict", "submission", "text"},
    "submission": {"engine", "inputs", "requests"},
    "summary": {"descriptor", "engine", "programs", "requests", "scheduler"},
    "session": {
        "attention",
        "cache",
        "compilation_cache",
        "config",
        "descriptor",
        "engine",
        "invariance",
        "ladder",
        "machine",
        "programs",
        "progress",
        "resolve",
        "scheduler",
    },
    "engine": {
        "descriptor",
        "ladder",
        "programs",
        "recording",
        "requests",
        "sampling",
        "scheduler",
        "step_record",
        "strict",
        "tracing",
    },
    "tracing": {"requests", "scheduler", "step_record"},
    "timeline": {"paths", "requests", "scheduler", "step_record", "strict"},
    "recording": {"__init__", "scheduler"},
    "step_record": {"scheduler"},
    "invariance": {"descriptor", "ladder", "models", "programs", "sampling", "scheduler", "step"},
    "programs": {"cache", "descriptor", "host_memory", "models", "scheduler", "step"},
    "step": {"attention", "cache", "descriptor", "models", "sampling"},
    "resolve": {"config", "ladder", "machine", "sampling", "scheduler"},
    "inputs": {"config"},
    "checkpoints": {"models", "paths", "progress", "text"},
    "models": {"attention"},
    "cache": {"attention"},
    "attention": {"pallas_kernels"},
    "ladder": {"scheduler"},
    "simulate": {"ladder", "progress", "scheduler"},
    "descriptor": {"scheduler"},
    "config": {"sampling", "scheduler", "strict"},
    "compilation_cache": {"paths"},
    "host_memory": set(),
    "machine": set(),
    "paths": set(),
    "progress": set(),
    "requests": set(),
    "sampling": set(),
    "scheduler": set(),
    "strict": set(),
    "text": set(),
    "pallas_kernels": set(),
}


def unit_of(dotted: str) -> str:
    """The unit that a module belongs to; with a star before it, the top-level package of one that is not ours."""
    package, _, rest = dotted.partition(".")
    if package == "cbjax":
        return rest.partition(".")[0] or "__init__"
    return package if package == "pallas_kernels" else f"*{package}"


def is_unit(name: str) -> bool:
    """Whether that is a module or package of cbjax, not a name that the package itself has."""
    return any((ROOT / "cbjax" / path).exists() for path in (f"{name}.py", f"{name}/__init__.py"))


def imports_of(path: Path, *, for_types_only: bool) -> Iterator[str]:
    """Dotted names that a file imports anywhere, in functions too; `if TYPE_CHECKING:` blocks only if asked."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            assert node.module is not None
            # `from cbjax import x` imports the unit x or a name of the package itself.
            names = [f"cbjax.{alias.name}" for alias in node.names if is_unit(alias.name)]
            yield from names if node.module == "cbjax" and names else [node.module]
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        pending += node.orelse if typing_only and not for_types_only else ast.iter_child_nodes(node)


@functools.cache
def graph() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in SOURCES:
        unit = unit_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found[unit] |= {unit_of(name) for name in imports_of(path, for_types_only=False)} - {unit}
    return found


def test_every_unit_is_in_the_table_and_the_table_has_no_cycle() -> None:
    assert graph().keys() == MAY_IMPORT.keys()
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("scheduler") < order.index("descriptor") < order.index("engine") < order.index("cli")


@pytest.mark.parametrize("unit", MAY_IMPORT)
def test_a_unit_imports_only_what_it_may(unit: str) -> None:
    ours = {other for other in graph()[unit] if not other.startswith("*")}
    assert ours <= MAY_IMPORT[unit], f"{unit} imports {sorted(ours - MAY_IMPORT[unit])}"


def test_the_walk_sees_imports_in_functions_and_not_those_for_types(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n"
        "def f():\n    from cbjax.engine import Engine\n    from cbjax import cli, mixin, CausalLM\n"
    )
    at_run_time = {"a.b", "typing", "d", "cbjax.engine", "cbjax.cli", "cbjax.mixin"}
    assert set(imports_of(path, for_types_only=False)) == at_run_time
    assert set(imports_of(path, for_types_only=True)) == at_run_time | {"c"}


def test_the_scheduler_needs_numpy_and_one_persistent_map_library() -> None:
    foreign = {unit[1:] for unit in graph()["scheduler"] if unit.startswith("*")}
    assert foreign - sys.stdlib_module_names == {"numpy", "rpds"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_torch_or_transformers(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports_of(path, for_types_only=True)} & set(FOREIGN)


def test_modules_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {str(path): n for path, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) < 150


def loaded_by(*arguments: str) -> tuple[set[str], str]:
    """Top-level modules that a fresh interpreter loads for these arguments, and its standard output."""
    command = [sys.executable, "-X", "importtime", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    assert len(lines) > 20, run.stderr
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, run.stdout


def test_the_probe_for_loaded_modules_sees_jax() -> None:
    assert {"jax", "numpy"} <= loaded_by("-c", "import cbjax.descriptor")[0]


@pytest.mark.parametrize(
    "module",
    [
        f"cbjax.{unit}"
        for unit in (
            "scheduler",
            "recording",
            "simulate",
            "config",
            "requests",
            "sampling",
            "inputs",
            "ladder",
            "step_record",
            "timeline",
            "cli",
        )
    ],
)
def test_importing_it_does_not_import_jax(module: str) -> None:
    loaded, _ = loaded_by("-c", f"import {module}")
    assert "cbjax" in loaded
    assert not loaded & {*HEAVY, *FOREIGN}


def test_importing_cbjax_imports_nothing_else() -> None:
    loaded, names = loaded_by("-c", "import cbjax; print(*dir(cbjax))")
    assert not loaded & {"numpy", *HEAVY, *FOREIGN}
    assert "CausalLM" in names.split()


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("generate", "--help"), ("replay", "--help"), ("simulate", "--help"), ("--version",)],
)
def test_help_does_not_import_jax(arguments: tuple[str, ...]) -> None:
    loaded, out = loaded_by("-m", "cbjax", *arguments)
    assert "cbjax" in out
    assert not loaded & {"numpy", *HEAVY, *FOREIGN}


def test_public_names_are_there_and_unknown_ones_are_not() -> None:
    import cbjax

    for name in cbjax.__all__:
        assert getattr(cbjax, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        cbjax.Nothing  # noqa: B018
