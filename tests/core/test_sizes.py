"""Sizes as people write them."""

import pytest

from ckptctl.core.errors import Usage
from ckptctl.core.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("5GB", 5_000_000_000),
        ("200KB", 200_000),
        ("200kb", 200_000),
        ("512MiB", 512 << 20),
        ("1 gib", 1 << 30),
        ("7", 7),
        ("7B", 7),
        ("1.5TB", 1_500_000_000_000),
        ("2TiB", 2 << 40),
        (" 3 MB ", 3_000_000),
        ("0.29GB", 290_000_000),
        ("0", 0),
        ("1.0001B", 1),
    ],
)
def test_sizes_are_read(text, want):
    assert parse_size(text) == want


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5 PB", "5G", "1e9", "nan", "5GB5", "٥GB", "1_000", "5,5GB", "9" * 40, "99999999TB"]
)
def test_anything_else_is_a_usage_error(text):
    with pytest.raises(Usage, match="--memory") as caught:
        parse_size(text, "--memory")
    assert caught.value.exit_code == 2


def test_decimal_units_agree_with_huggingface_hub():
    base = pytest.importorskip("huggingface_hub.serialization._base")
    for text in ("5GB", "200KB", "1.5MB", "2TB", "10gb"):
        assert parse_size(text) == base.parse_size_to_int(text)
