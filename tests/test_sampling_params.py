"""Sampling parameters: validation, the sampler words, derived seeds (cases B21, B22, B28)."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import cbjax.sampling
from cbjax.sampling import EPSILON, NUM_WORDS, SamplingParams, derive_seed
from cbjax.sampling.settings import unpack


def unpack_one(params: SamplingParams) -> dict:
    return {name: value[0].item() for name, value in unpack(jnp.asarray(params.pack()[:, None]))._asdict().items()}


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("temperature", float("nan"), ValueError),
        ("temperature", float("inf"), ValueError),
        ("temperature", 1e39, ValueError),
        ("temperature", 10**400, ValueError),
        ("temperature", -0.1, ValueError),
        ("temperature", True, TypeError),
        ("temperature", "1", TypeError),
        ("temperature", [1.0], TypeError),
        ("top_k", -2, ValueError),
        ("top_k", True, TypeError),
        ("top_k", "5", TypeError),
        ("top_k", 5.0, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", -0.5, ValueError),
        ("top_p", 1.0000001, ValueError),
        ("top_p", float("nan"), ValueError),
        ("top_p", True, TypeError),
        ("top_p", "0.9", TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**64, ValueError),
        ("seed", None, TypeError),
        ("seed", 1.0, TypeError),
        ("seed", False, TypeError),
        ("do_sample", 1, TypeError),
        ("do_sample", None, TypeError),
        ("logprobs", "yes", TypeError),
        ("logprobs", 5, TypeError),
    ],
)
def test_b28_bad_values_raise_an_error_that_names_field_and_value(field, value, error):
    with pytest.raises(error, match=field) as caught:
        SamplingParams(**{field: value})
    shown = str(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
    assert shown in str(caught.value)


def test_values_become_plain_python_so_that_equal_settings_are_equal():
    ours = SamplingParams(
        do_sample=np.True_, temperature=np.float32(0.5), top_k=np.int64(7), top_p=1, seed=np.uint64(2**64 - 1)
    )
    assert ours == SamplingParams(do_sample=True, temperature=0.5, top_k=7, top_p=1.0, seed=2**64 - 1)
    assert hash(ours) == hash(SamplingParams(do_sample=True, temperature=0.5, top_k=7, top_p=1.0, seed=2**64 - 1))
    assert [type(value) for value in (ours.do_sample, ours.temperature, ours.top_k, ours.top_p, ours.seed)] == [
        bool,
        float,
        int,
        float,
        int,
    ]
    assert SamplingParams(temperature=1).temperature == 1.0


def test_words_carry_every_setting_to_the_device():
    params = SamplingParams(
        do_sample=True, temperature=0.7, top_k=40, top_p=0.9, seed=0x0123456789ABCDEF, logprobs=True
    )
    words = params.pack()
    assert words.dtype == np.uint32
    assert words.shape == (NUM_WORDS,)
    assert unpack_one(params) == {
        "sampled": True,
        "logprobs": True,
        "temperature": np.float32(0.7).item(),
        "top_k": 40,
        "top_p": np.float32(0.9).item(),
        "seed_low": 0x89ABCDEF,
        "seed_high": 0x01234567,
    }


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_b21_top_k_off_is_off_and_not_one(top_k):
    assert unpack_one(SamplingParams(do_sample=True, top_k=top_k))["top_k"] == 0


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 10**18])
def test_b21_top_k_beyond_any_vocabulary_stays_large(top_k):
    assert unpack_one(SamplingParams(do_sample=True, top_k=top_k))["top_k"] == 2**31 - 1


@pytest.mark.parametrize("top_p", [None, 1.0, 1, 1 - 1e-9])
def test_top_p_off_reads_as_one(top_p):
    assert unpack_one(SamplingParams(do_sample=True, top_p=top_p))["top_p"] == 1.0


@pytest.mark.parametrize("top_p", [1e-300, 5e-324, 1e-40])
def test_top_p_too_small_for_float32_stays_positive_and_normal(top_p):
    assert unpack_one(SamplingParams(do_sample=True, top_p=top_p))["top_p"] == np.finfo(np.float32).tiny


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-30, EPSILON * 0.999])
def test_b22_temperature_below_epsilon_is_greedy_and_never_the_default(temperature):
    params = SamplingParams(do_sample=True, temperature=temperature, top_k=5, top_p=0.5)
    assert params.greedy
    assert not unpack_one(params)["sampled"]


@pytest.mark.parametrize("temperature", [EPSILON, 1e-5, 1e-3, 100.0])
def test_b22_temperature_from_epsilon_up_is_sampled(temperature):
    unpacked = unpack_one(SamplingParams(do_sample=True, temperature=temperature))
    assert unpacked["sampled"]
    assert unpacked["temperature"] == np.float32(temperature)


def test_b22_no_temperature_is_one():
    assert (SamplingParams(do_sample=True).pack() == SamplingParams(do_sample=True, temperature=1.0).pack()).all()


def test_greedy_ignores_temperature_and_filters():
    plain = SamplingParams(seed=3).pack()
    assert (SamplingParams(temperature=0.3, top_k=5, top_p=0.2, seed=3).pack() == plain).all()
    assert (SamplingParams(do_sample=True, temperature=0.0, top_k=5, top_p=0.2, seed=3).pack() == plain).all()


def test_zero_words_read_as_a_greedy_row_without_logprobs():
    settings = unpack(jnp.zeros((NUM_WORDS, 1), jnp.uint32))
    assert not settings.sampled[0]
    assert not settings.logprobs[0]
    assert (settings.temperature[0], settings.top_k[0], settings.top_p[0]) == (1.0, 0, 1.0)


def test_derived_seeds_are_64_bit_stable_and_distinct():
    # Fixed for ever: a config seed promises these.
    assert derive_seed(0, 0) == 6746257971700673331
    assert derive_seed(42, 7) == 10952341557785116369
    seeds = {derive_seed(config, index) for config in range(-20, 20) for index in range(200)}
    assert len(seeds) == 40 * 200
    assert max(seeds) < 2**64
    assert max(seeds) > 2**63
    assert derive_seed(1, 11) != derive_seed(11, 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((0, -1), ValueError), ((0, 1.0), TypeError), ((None, 0), TypeError), ((True, 0), TypeError)],
)
def test_derive_seed_refuses_what_is_not_a_count(arguments, error):
    with pytest.raises(error):
        derive_seed(*arguments)


def test_importing_the_parameters_does_not_import_jax():
    root = Path(cbjax.sampling.__file__).parents[2]
    code = "import sys, cbjax.sampling; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
