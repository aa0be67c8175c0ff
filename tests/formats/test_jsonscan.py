"""Objects of texts, as weight_map and __metadata__ are: what Python's json reads from the same text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.errors import Damaged
from ckptctl.formats.jsonscan import Scan

WORDS = st.one_of(st.sampled_from(["", "a", "model.layers.0.w", 'q"\\\n', "é\u2028"]), st.text(max_size=4))
SPACES = st.text(" \t\n\r", max_size=2)


@st.composite
def objects(draw):
    """An object as text: keys may stand twice, white space and escapes anywhere."""
    members, parts = draw(st.lists(st.tuples(WORDS, st.one_of(WORDS, st.sampled_from([None, 1, [True], {}]))))), []
    for key, value in members:
        ascii_too = draw(st.booleans())
        words = [json.dumps(x, ensure_ascii=ascii_too) for x in (key, value)]
        parts.append(draw(SPACES) + f"{words[0]}{draw(SPACES)}:{draw(SPACES)}{words[1]}" + draw(SPACES))
    return "{" + (",".join(parts) or draw(SPACES)) + "}"


@given(objects())
def test_texts_are_what_json_reads(text):
    raw = text.encode()
    texts, others, twice, stop = Scan(raw, "x", noun="it", code="bad").texts(0)
    assert stop == len(raw)
    wanted: dict[str, str] = {}
    again, odd = [], []
    for key, value in json.loads(text, object_pairs_hook=list):
        again += [key] if key in wanted else []
        if isinstance(value, str):
            wanted[key] = value
        else:
            odd.append(key)
    assert (texts, others, twice) == (wanted, odd, again)


@pytest.mark.parametrize(
    "text", ['{"a":"b",}', '{"a":"b" "c":"d"}', '{"a":"b","c"}', '{"a":"b', '{"a":"\x01","b":"c"}']
)
def test_what_is_no_object_of_json_is_refused_behind_good_members_too(text):
    with pytest.raises(Damaged):
        Scan(b'{"g":"h",' + text[1:].encode(), "x", noun="it", code="bad").texts(0)
