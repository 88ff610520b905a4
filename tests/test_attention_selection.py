"""Which attention implementation is taken, and what is said of it."""

import pytest

from cbjax import ContinuousBatchingConfig
from cbjax.attention import LayerSpec, choose_attention
from cbjax.config import ATTENTIONS
from cbjax.testing import tiny_llama

LAYERS = [LayerSpec(num_heads=4, num_kv_heads=2, head_dim=64)]


def choose(asked=None, **facts):
    given = {"platform": "tpu", "layers": LAYERS, "block_size": 64, "dtype": "bfloat16"} | facts
    return choose_attention(asked, **given)


@pytest.mark.parametrize(
    ("asked", "platform", "used", "layout", "why"),
    [
        (None, "tpu", "pallas", "block_major", "kernels for TPUs"),
        ("pallas", "tpu", "pallas", "block_major", "as asked"),
        (None, "cpu", "xla", "head_major", "kernels are for TPUs"),
        (None, "gpu", "xla", "head_major", "kernels are for TPUs"),
        ("xla", "tpu", "xla", "head_major", "as asked"),
        ("eager", "tpu", "eager", "head_major", "slow"),
        ("pallas", "cpu", "pallas, interpreted", "block_major", "there is no TPU"),
    ],
)
def test_what_is_asked_for_is_given_else_what_suits_the_device(asked, platform, used, layout, why):
    choice = choose(asked, platform=platform)
    assert choice.used == used
    assert choice.attention.layout == layout
    assert why in choice.why


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"block_size": 48}, r"block_size must be one of \(16, 32, 64, 128, 256\)"),
        ({"dtype": "float16"}, "got float16"),
        ({"layers": [*LAYERS, LayerSpec(num_heads=1, num_kv_heads=1, head_dim=576)]}, "got head_dim 576"),
    ],
)
def test_invariant_8_what_the_kernels_cannot_serve_is_said_or_refused(facts, why):
    choice = choose(**facts)
    assert choice.used == "xla"
    with pytest.raises(NotImplementedError, match=f"attn_implementation='pallas': .*{why}.*leave it at None"):
        choose("pallas", **facts)


def test_on_a_gpu_the_tpu_kernels_are_refused_and_the_remedy_is_named():
    with pytest.raises(NotImplementedError, match="are for TPUs, and this is a gpu; leave it at None, which takes xla"):
        choose("pallas", platform="gpu")


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
