"""Strictness shared by every test: strict promotion, warnings as errors (pyproject), no global caches."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
