import pytest

from ckptctl.core.errors import Usage
from ckptctl.remote.address import Address, is_address, parsed

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://owner/name", Address("owner/name")),
        ("hf:/owner/name", Address("owner/name")),  # as a path has it
        ("hf://owner/name/", Address("owner/name")),
        ("hf://owner/name@main", Address("owner/name", revision="main")),
        (
            "hf://owner/name@v1.0/step_5/model.safetensors",
            Address("owner/name", "model", "v1.0", "step_5/model.safetensors"),
        ),
        ("hf://owner/name/step_5", Address("owner/name", path="step_5")),
        ("hf://owner/name@refs/pr/12/a/b", Address("owner/name", "model", "refs/pr/12", "a/b")),
        ("hf://owner/name@refs/convert/parquet", Address("owner/name", "model", "refs/convert/parquet")),
        ("hf://owner/name@feature%2Fone/a", Address("owner/name", "model", "feature/one", "a")),
        ("hf://datasets/owner/name@main/a", Address("owner/name", "dataset", "main", "a")),
        ("hf://spaces/owner/name", Address("owner/name", "space")),
        ("hf://models/owner/name", Address("owner/name")),
        ("hf://gpt2", Address("gpt2")),
        ("hf://gpt2@main/config.json", Address("gpt2", "model", "main", "config.json")),
        (f"hf://o/n@{COMMIT}/a@b", Address("o/n", "model", COMMIT, "a@b")),
        ("hf://o/n/a@b/c", Address("o/n", path="a@b/c")),
    ],
)
def test_an_address_is_read(text, address):
    assert is_address(text)
    assert parsed(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf://",
        "hf:///",
        "hf://datasets",
        "hf://datasets/",
        "hf://owner/name@",
        "hf://owner/name@/a",
        "hf://ow ner/name",
        "hf://../name",
        "hf://owner/..",
        "hf://owner/na..me",
        "hf://owner/.name",
        "hf://owner/name.git",
        "hf://owner/name/../other",
        "hf://owner/name/a//b",
        "hf://owner/name/a/./b",
        "hf://owner/name/a\0b",
        "hf://owner/" + "n" * 200,
        "hf://owner/name?revision=main",
    ],
)
def test_what_is_no_address_is_wrong_usage(text):
    assert is_address(text)
    with pytest.raises(Usage) as raised:
        parsed(text)
    assert raised.value.fix


@pytest.mark.parametrize(
    "text", ["owner/name", "hf", "hf/owner", "./hf:/a", "/hf:/a", "hf:owner/name", "https://hf.co/a/b"]
)
def test_other_paths_are_no_address(text):
    assert not is_address(text)


@pytest.mark.parametrize("text", ["hf://o/n", "hf://datasets/o/n@main/a/b", "hf://gpt2@x/y"])
def test_an_address_reads_back_as_it_is_shown(text):
    assert str(parsed(text)) == text


def test_only_a_full_hash_pins():
    assert parsed(f"hf://o/n@{COMMIT}").is_pinned
    assert not parsed(f"hf://o/n@{COMMIT[:12]}").is_pinned
    assert not parsed("hf://o/n").is_pinned
    assert str(parsed("hf://o/n/a").at(COMMIT)) == f"hf://o/n@{COMMIT}/a"
