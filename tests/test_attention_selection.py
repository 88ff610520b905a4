"""Which attention implementation is taken, and what is said of it."""

import pytest

from cbjax import ContinuousBatchingConfig
from cbjax.attention import LayerSpec, Place, choose_attention
from cbjax.config import ATTENTIONS
from cbjax.testing import tiny_llama

LAYERS = [LayerSpec(num_heads=4, num_kv_heads=2, head_dim=64)]


def choose(asked=None, *, layers=LAYERS, **facts):
    given = {"platform": "tpu", "capability": "9.0", "block_size": 64, "dtype": "bfloat16"} | facts
    return choose_attention(asked, layers, Place(**given))


@pytest.mark.parametrize(
    ("asked", "platform", "used", "layout", "why"),
    [
        (None, "tpu", "pallas", "tpu", "kernels for TPUs"),
        ("pallas", "tpu", "pallas", "tpu", "as asked"),
        (None, "gpu", "pallas", "gpu", "kernels for GPUs"),
        ("pallas", "gpu", "pallas", "gpu", "as asked"),
        (None, "cpu", "xla", "head_major", "kernels are for TPUs and GPUs"),
        ("xla", "tpu", "xla", "head_major", "as asked"),
        ("xla", "gpu", "xla", "head_major", "as asked"),
        ("eager", "tpu", "eager", "head_major", "slow"),
        ("pallas", "cpu", "pallas, interpreted", "tpu", "there is no TPU"),
    ],
)
def test_what_is_asked_for_is_given_else_what_suits_the_device(asked, platform, used, layout, why):
    choice = choose(asked, platform=platform)
    assert choice.used == used
    assert choice.attention.layout == layout
    assert why in choice.why
    assert choice.is_interpreted == ("interpreted" in used)


WIDE = [*LAYERS, LayerSpec(num_heads=1, num_kv_heads=1, head_dim=576)]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"block_size": 48}, r"block_size must be one of \(16, 32, 64, 128, 256\)"),
        ({"dtype": "float16"}, "got float16"),
        ({"layers": WIDE}, "got head_dim 576"),
        ({"platform": "gpu", "block_size": 48}, r"block_size must be one of \(16, 32, 64, 128, 256\)"),
        ({"platform": "gpu", "dtype": "float32"}, "got float32: load the model with dtype=.bfloat16."),
        ({"platform": "gpu", "layers": WIDE}, "got head_dim 576"),
        ({"platform": "gpu", "layers": [LayerSpec(num_heads=130, num_kv_heads=2, head_dim=64)]}, "kv head; got 65"),
        ({"platform": "gpu", "batch_invariant": True}, "batch_invariant"),
        ({"platform": "gpu", "capability": "8.0"}, r"Hopper's .*\(compute capability 9.0\), and this GPU has 8.0"),
        ({"platform": "gpu", "capability": "10.0"}, "this GPU has 10.0"),
        ({"platform": "METAL"}, "there are kernels for TPUs and GPUs; got METAL"),
        ({"platform": "gpu", "capability": "gfx942"}, "this GPU has gfx942"),
        ({"platform": "gpu", "capability": None}, "this GPU has an unknown one"),
    ],
)
def test_invariant_8_what_the_kernels_cannot_serve_is_said_or_refused(facts, why):
    choice = choose(**facts)
    assert choice.used == "xla"
    assert "not the Pallas kernels: " in choice.why
    with pytest.raises(NotImplementedError, match=f"attn_implementation='pallas': .*{why}.*leave it at None.*xla"):
        choose("pallas", **facts)


def test_a_gpus_grids_are_as_large_as_the_gpu():
    assert choose(platform="gpu", multiprocessors=114).attention.sizes.multiprocessors == 114
    assert choose(platform="gpu").attention.sizes.multiprocessors == 132


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_config_takes_transformers_prefix_off(name):
    assert ContinuousBatchingConfig(attn_implementation=f"paged|{name}").attn_implementation == name
    assert choose(name, platform="cpu").attention.name == name


@pytest.mark.parametrize("name", ["flash_attention_2", "", "paged|", 3, b"xla"])
def test_the_config_refuses_other_names(name):
    with pytest.raises(ValueError, match="must be one of pallas, xla, eager"):
        ContinuousBatchingConfig(attn_implementation=name)


def test_the_report_says_who_attends():
    lm = tiny_llama(num_layers=1)
    lm.compile_plan(ContinuousBatchingConfig(block_size=4, num_blocks=8, attn_implementation="paged|eager"))
    (line,) = [line for line in lm.session.resolved.report().splitlines() if "attn_implementation" in line]
    assert line.split()[:3] == ["attn_implementation", "eager", "eager"]
    lm.close()
