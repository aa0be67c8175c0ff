"""The model card: what it says, that it is Markdown and YAML as readers take them, and that a user's words stay."""

from __future__ import annotations

import itertools

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ckptctl.report.card import Facts, card, escaped, metadata

ROWS = [("parameters", "1,234 in 5 tensors"), ("dtype", "bfloat16"), ("family", "a_b|c*d <script>")]
LINES = [{"part": "exp_avg", "fate": "dropped", "detail": "39 tensors: --no-optimizer | `x`"}]
FIELDS = {"library_name": "transformers", "tags": ["llama"]}
FACTS = Facts("my_model", FIELDS, ROWS, LINES, "ckptctl push a org/b")


def split(text: str) -> tuple[dict, str]:
    """The metadata as YAML's reader has them, and the rest."""
    _, block, rest = text.split("---\n", 2)
    return yaml.safe_load(block), rest


def cells(markdown: str) -> list[list[str]]:
    """The rows of all tables of rendered Markdown, as text."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "tr_open":
            rows.append([])
        if token.type == "inline" and token.level >= 4:
            rows[-1].append("".join(c.content for c in token.children or []))
    return rows


def headings(markdown: str) -> list[str]:
    tokens = MarkdownIt("commonmark").parse(markdown)
    return [b.content for a, b in itertools.pairwise(tokens) if a.type == "heading_open"]


def test_a_new_card_has_metadata_tables_and_the_command():
    fields, text = split(card(FACTS))
    assert fields == {"library_name": "transformers", "tags": ["llama"]}
    assert headings(text) == ["my\\_model", "Checkpoint", "What became of each part", "Command"]
    assert [r for r in cells(text) if r != ["", ""]] == [
        ["parameters", "1,234 in 5 tensors"],
        ["dtype", "bfloat16"],
        ["family", "a_b|c*d <script>"],
        ["part", "fate", "detail"],
        ["exp_avg", "dropped", "39 tensors: --no-optimizer | `x`"],
    ]
    code = [t.content for t in MarkdownIt("commonmark").parse(text) if t.type == "code_block"]
    assert code == ["ckptctl push a org/b\n"]


def test_a_card_is_made_anew_without_a_change():
    once = card(FACTS)
    assert card(FACTS, once) == once


@pytest.mark.parametrize(
    "old",
    [
        "",
        "# Mine\n\nText.",
        "---\nlicense: mit\n---\n# Mine\n\nText.\n",
        "---\nlicense: mit\ntags:\n- mine\nlibrary_name: other\n---\n\n# Mine",
        "---\n---\n# Mine\n",
        "\ufeff---\nlicense: mit\n---\n# Mine\n",
        "---\r\nlicense: mit\r\n---\r\n# Mine\r\n",
    ],
)
def test_words_and_metadata_that_are_there_stay(old):
    made = card(FACTS, old)
    fields, text = split(made.replace("\r\n", "\n"))
    body = old.removeprefix("\ufeff").replace("\r\n", "\n").rpartition("---\n")[2]
    assert body in text
    was = yaml.safe_load(old.split("---")[1]) if "---" in old else {}
    assert {**FIELDS, **(was or {})} == fields
    assert card(FACTS, made) == made


def test_the_part_of_a_card_that_is_ours_is_replaced_where_it_stands():
    text = card(FACTS, "# Mine\n") + "\n## More of mine\n"
    changed = card(Facts("t", {}, [("parameters", "9")], [], "again"), text)
    assert "1,234" not in changed
    assert changed.index("# Mine") < changed.index("| parameters | 9 |") < changed.index("## More of mine")


def test_metadata_in_one_line_are_left_alone():
    made = card(FACTS, "---\n{license: mit}\n---\n# Mine\n")
    assert split(made)[0] == {"license": "mit"}


def test_metadata_say_what_files_say_and_no_licence():
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert metadata(config, None) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama"],
    }
    assert metadata({"model_type": "x: [y"}, None) == {"tags": ["safetensors"]}
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    assert metadata(None, adapter) == {"library_name": "peft", "base_model": "org/base"}
    assert metadata(None, {**adapter, "base_model_name_or_path": "/home/me/base"}) == {"library_name": "peft"}


@given(st.text())
def test_any_text_is_shown_as_it_is_in_a_cell(text):
    shown = cells(f"| a |\n|---|\n| {escaped(text)} |\n")[1][0]
    assert shown == " ".join("".join(c if c.isprintable() else " " for c in text).split())


@given(st.dictionaries(st.sampled_from(["tags", "base_model"]), st.text() | st.lists(st.text(), min_size=1)))
def test_any_metadata_are_yaml(fields):
    plain = {
        k: v
        for k, v in fields.items()
        if all(c.isprintable() for one in ([v] if isinstance(v, str) else v) for c in one)
    }
    if plain:
        assert split(card(Facts("t", plain, [], [], "c")))[0] == plain
