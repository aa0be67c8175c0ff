"""Which weights a config ties."""

import pytest

from ckptctl.names import absent_head, head_and_embedding, is_tied


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False, "model_type": "gpt2"}, False),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "llama"}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": "yes"}, False),
        ({"text_config": 3}, False),
        ({}, False),
    ],
)
def test_a_config_s_own_word_comes_first_then_its_text_model_s_then_its_family_s(config, want):
    assert is_tied(config) is want


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], ("lm_head.weight", "model.embed_tokens.weight")),
        (["transformer.wte.weight", "lm_head.weight"], ("lm_head.weight", "transformer.wte.weight")),
        (["gpt_neox.embed_in.weight", "embed_out.weight"], ("embed_out.weight", "gpt_neox.embed_in.weight")),
        (["x.lm_head.weight", "x.model.embed_tokens.weight"], ("x.lm_head.weight", "x.model.embed_tokens.weight")),
        (["lm_head.weight"], None),
        (["model.embed_tokens.weight"], None),
        (["my_lm_head.weight", "model.embed_tokens.weight"], None),
        ([], None),
    ],
)
def test_the_pair_that_a_tie_joins(names, want):
    assert head_and_embedding(names) == want


@pytest.mark.parametrize(
    ("names", "config", "want"),
    [
        (["model.embed_tokens.weight"], {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}, True),
        (["model.embed_tokens.weight"], {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}, False),
        (
            ["model.embed_tokens.weight"],
            {"tie_word_embeddings": True, "architectures": ["LlamaForSequenceClassification"]},
            False,
        ),
        (["model.embed_tokens.weight", "lm_head.weight"], {"tie_word_embeddings": True}, False),
        (["encoder.weight"], {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}, False),
    ],
)
def test_a_head_that_is_not_stored_is_known_where_there_is_one(names, config, want):
    assert (absent_head(names, config) is not None) == want
