"""Strictness shared by every test: strict promotion, warnings as errors (pyproject), no global caches."""

import os

# Before jax is imported: tests never read or fill a user's compilation cache.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
