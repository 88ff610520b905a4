"""What tests of benchmarks share: a tiny model's folder, and a run that looks at the form of its JSON file."""

import json

import pytest

from benchmarks.hf_folder import write_folder
from cbjax.testing import tiny_llama

FIELDS = {"benchmark", "command", "machine", "versions", "settings", "figures", "limits", "notes"}
SPREAD = {"unit", "median", "min", "max", "p99", "count", "values"}
TINY = ("--quick", "--dtype", "float32")
BUDGET = ("--max-batch-tokens", 64)  # one mixed bucket, so few programs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as a Hugging Face folder."""
    lm, folder = tiny_llama(num_layers=1), tmp_path_factory.mktemp("model")
    assert lm.config is not None
    write_folder(folder, lm.config, lm.params)
    return folder


@pytest.fixture
def measured(tmp_path, capsys):
    """Runs a benchmark's main, and returns its JSON after a look at its form."""

    def run(main, *argv, more=frozenset()):
        file = tmp_path / "figures.json"
        main([*map(str, argv), "--json", str(file)])
        document = json.loads(file.read_text())
        assert document.keys() == FIELDS | more
        assert {"device", "processor", "cores"} == document["machine"].keys()
        assert {"python", "jax", "cbjax"} <= document["versions"].keys()
        assert document["figures"]
        for figure in document["figures"].values():
            assert figure.keys() == SPREAD
            assert figure["min"] <= figure["median"] <= figure["p99"] <= figure["max"]
        assert document["limits"].keys() <= document["figures"].keys()
        out = capsys.readouterr().out
        assert document["command"] in out
        for name in (*document["figures"], *document["versions"], *document["notes"]):
            assert name in out
        return document

    return run
