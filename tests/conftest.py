"""Strictness shared by every test: strict promotion, warnings as errors (pyproject), no global caches."""

import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ["benchmark_fixtures"]


# Files that take longest. Workers take whole files, since their tests share models, and these first: else one of them
# would be left alone with the last.
_LONGEST = ("test_smollm2_parity.py", "test_families.py", "test_notebooks.py", "test_pressure_model.py")


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist's order, most tests first, is not that of time


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory):
    """Programs of equal shapes are compiled once per test run; a user's own cache is neither read nor filled."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file: cached, given by CBJAX_DEMO_MODEL, or fetched once."""
    from cbjax.checkpoints import fetch_demo

    return fetch_demo(progress=True)


@pytest.fixture
def interruptible():
    """SIGINT raises, also where the run was started in the background of a shell, which ignores it.

    And it raises where the test looks for it: one that comes while garbage is collected is lost in jax's callback.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)
