"""Which parameters make an FSDP1 unit: hand-made models, and sizes worked out on paper."""

from __future__ import annotations

from ckptctl.formats.ranks.wrapping import Member, members, share, unit_of, wrappings


def llama(layers: int, hidden: int = 4, vocab: int = 7) -> dict[str, tuple[int, ...]]:
    out = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        out[f"model.layers.{i}.self_attn.q_proj.weight"] = (hidden, hidden)
        out[f"model.layers.{i}.mlp.up_proj.weight"] = (3, hidden)
        out[f"model.layers.{i}.norm.weight"] = (hidden,)
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


BLOCK = 16 + 12 + 4
ROOT = 28 + 4 + 28


def test_members_lie_one_after_the_other():
    shapes = {"a": (2, 3), "b": (), "c": (0, 4), "d": (5,)}
    assert members(list(shapes), shapes) == (
        Member("a", 0, 6, (2, 3)),
        Member("b", 6, 7, ()),
        Member("c", 7, 7, (0, 4)),
        Member("d", 7, 12, (5,)),
    )


def test_shares_are_rounded_up():
    assert [share(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_parameter_is_in_the_innermost_unit():
    prefixes = ["", "model.layers.1.", "model.layers.11."]
    assert unit_of("model.layers.11.norm.weight", prefixes) == "model.layers.11."
    assert unit_of("model.norm.weight", prefixes) == ""
    assert unit_of("model.norm.weight", prefixes[1:]) is None


def test_blocks_and_a_root_with_what_is_left():
    shapes = llama(3)
    found, all_tried = wrappings(shapes, [share(ROOT, 2), *[BLOCK // 2] * 3], 2)
    assert all_tried
    assert len(found) == 1
    assert found[0][0] == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert found[0][1] == tuple(n for n in shapes if n.startswith("model.layers.0."))


def test_one_unit_of_everything():
    shapes = llama(2)
    found, _ = wrappings(shapes, [share(ROOT + 2 * BLOCK, 5)], 5)
    assert found == [(tuple(shapes),)]


def test_modules_within_wrapped_blocks():
    shapes = llama(2)
    shares = [ROOT, 4, 16, 12, 4, 16, 12]  # a block's norm is what is left of it
    found, _ = wrappings(shapes, shares, 1)
    assert len(found) == 1
    assert found[0][1] == ("model.layers.0.norm.weight",)
    assert found[0][2] == ("model.layers.0.self_attn.q_proj.weight",)


def test_sizes_that_no_wrapping_gives():
    assert wrappings(llama(2), [ROOT, BLOCK, BLOCK + 1], 1) == ([], True)
    assert wrappings(llama(2), [1], 1) == ([], True)


def test_two_wrappings_of_equal_sizes_are_both_told():
    shapes = {"a.weight": (4,), "b.weight": (4,), "c": (4,)}
    found, _ = wrappings(shapes, [8, 4], 1)
    assert found == [(("b.weight", "c"), ("a.weight",)), (("a.weight", "c"), ("b.weight",))]


def test_a_share_that_nothing_tells_fits_anything():
    found, _ = wrappings(llama(2), [None, BLOCK, BLOCK], 1)
    assert len(found) == 1


def test_a_model_with_too_many_ways_is_given_up():
    shapes = {f"m{i}.x.weight": (2,) for i in range(40)} | {"last": (2,)}
    _, all_tried = wrappings(shapes, [2] * 20, 1)
    assert not all_tried
