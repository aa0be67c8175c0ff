"""Which axis tensor parallelism cuts."""

import pytest

from ckptctl.names.parallel import tensor_parallel_axis


@pytest.mark.parametrize(
    ("name", "axes", "axis"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, 0),
        ("model.layers.0.self_attn.q_proj.bias", 1, 0),
        ("model.layers.0.self_attn.o_proj.weight", 2, 1),
        ("model.layers.0.self_attn.o_proj.bias", 1, None),
        ("model.layers.0.mlp.down_proj.weight", 2, 1),
        ("model.embed_tokens.weight", 2, 0),
        ("lm_head.weight", 2, 0),
        ("layers.0.feed_forward.w2.weight", 2, 1),
        ("model.layers.0.input_layernorm.weight", 1, None),
        ("transformer.h.0.attn.c_attn.weight", 2, None),
        ("model.layers.0.mlp.experts.down_proj", 3, None),
        ("q_proj", 2, None),
        ("", 0, None),
    ],
)
def test_axis(name, axes, axis):
    assert tensor_parallel_axis(name, axes) == axis
