"""Patterns of parameters' names, against re.match, which DeepSpeed asks for each of them."""

from __future__ import annotations

import re

import pytest

from ckptctl.core.errors import Damaged
from ckptctl.formats.deepspeed.patterns import Patterns

NAMES = ["a", "a.b", "axb", "a.b.c", "a-b.0", "é.w", "", "^a$", "a\\b", "x(1)", "layers.1.w", "layers.11.w"]
LISTED = [
    *(rf"^{re.escape(n)}$" for n in NAMES),
    *(
        r"a.b",
        r"^a.b$",
        r"^a\.b",
        r"a\.b$",
        r".*w",
        r"^layers\.\d+\.w$",
        r"^\Aa$",
        r"^a\\b$",
        "",
        "^$",
        r"^\w$",
        r"^a\\$",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_matches_is_what_re_match_says(name):
    assert Patterns(LISTED, "here").of(name) == [i for i, p in enumerate(LISTED) if re.match(p, name)]


def test_patterns_of_one_name_each_are_not_tried():
    """A pattern a parameter, as AutoTP writes them: a thousand of each took minutes."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(1000)]
    patterns = Patterns([rf"^{re.escape(n)}$" for n in names], "here")
    assert not patterns._others
    assert [patterns.of(n) for n in names] == [[i] for i in range(1000)]


@pytest.mark.parametrize("pattern", ["*", "(" * 5000, "a{99999999999999999999999}", b"a", 3, None])
def test_what_is_no_pattern_is_damage(pattern):
    with pytest.raises(Damaged, match="is no pattern of names"):
        Patterns(["a", pattern], "here")
