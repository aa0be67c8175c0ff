"""The picture and the page of `verify`: what is in them, and that a name in a checkpoint is text and nothing else."""

from __future__ import annotations

import struct
import zlib

import pytest

from ckptctl.core.errors import CkptError, Usage
from ckptctl.report.picture import Bar, Picture, Words, png, svg
from ckptctl.report.recompute import html_page, picture, show_native, show_recompute, verify_files, write_verify_files


def dots(data: bytes) -> list[list[tuple[int, int, int]]]:
    """The dots of a PNG of 8-bit red, green and blue without filters, its checksums looked at."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, found = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        found[kind] = body
        at += 12 + size
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert (depth, colour, rest) == (8, 2, [0, 0, 0])
    rows = zlib.decompress(found[b"IDAT"])
    assert len(rows) == height * (1 + 3 * width)
    out = []
    for y in range(height):
        line = rows[y * (1 + 3 * width) :][: 1 + 3 * width]
        assert line[0] == 0
        out.append([tuple(line[1 + 3 * x : 4 + 3 * x]) for x in range(width)])
    return out


def test_a_bar_and_a_letter_are_where_they_should_be():
    made = Picture(20, 12, [Bar(1, 1, 3, 2, "#102030")], [Words(8, 2, "l")])
    got = dots(png(made, scale=1))
    assert (len(got), len(got[0])) == (12, 20)
    assert {(x, y) for y in range(12) for x in range(8) if got[y][x] != (255, 255, 255)} == {
        (x, y) for x in (1, 2, 3) for y in (1, 2)
    }
    assert got[1][1] == (16, 32, 48)
    letter = ["".join(".#"[got[2 + y][8 + x] != (255, 255, 255)] for x in range(5)) for y in range(7)]
    assert letter == [".##..", "..#..", "..#..", "..#..", "..#..", "..#..", ".###."]


def test_twice_the_scale_is_four_times_the_dots():
    made = Picture(20, 12, [Bar(1, 1, 3, 2, "#102030")], [Words(8, 2, "l7%")])
    small, large = dots(png(made, 1)), dots(png(made, 2))
    assert large == [[d for d in row for _ in "ab"] for row in small for _ in "ab"]


@pytest.mark.parametrize("text", ["", "ünknown\0", "x" * 500])
def test_what_does_not_fit_or_is_no_letter_does_no_harm(text):
    made = Picture(30, 10, [Bar(25, 5, 500, 500, "#ffffff"), Bar(99, 99, 1, 1, "#000000")], [Words(1, 1, text)])
    assert len(dots(png(made))) == 20


def test_words_in_svg_are_escaped():
    assert "<script" not in svg(Picture(9, 9, [], [Words(0, 0, "<script>&")]))


def policy(name, layers, kept, peak, seconds, equal=True):
    return {
        "policy": name, "recomputed_layers": layers, "loss": 1.0, "equal": equal, "repeatable": True,
        "first_difference": None if equal else {"name": "<b>w", "norm": 1.0, "norm_without": 2.0}, "kept_bytes": kept,
        "peak_bytes": peak, "seconds": seconds, "saving": 1 - peak / 4096, "kept_saving": 1 - kept / 2048,
        "extra_time": seconds - 1,
    }  # fmt: skip


def measured(equal=True):
    return {
        "layers": {"name": "model.layers", "count": 4}, "batch": [4, 32], "dropout": True, "measured": "live tensors",
        "repeatable": True, "equal": equal,
        "policies": [policy("none", 0, 2048, 4096, 1.0), policy("full", 4, 512, 1024, 1.25, equal)],
    }  # fmt: skip


def document(**more):
    side = {"path": "<i>run", "format": "dcp", "variant": "", "losses": [2.5], "gradient_norms": [1.5], "lr": [[0.001]]}
    return {
        "schema": "ckptctl.verify/1", "equal": True, "a": side, "steps": 1, "notes": ["a <note>"], "parameters": 39,
        "device": {"called": "cpu", "dtype": "float32", "torch": "2"}, "layers": {"run": 4, "of": 4},
        "checks": [{"ok": True, "name": "finite", "detail": ""}], **more,
    }  # fmt: skip


def test_the_page_has_everything_and_runs_nothing():
    native = {
        "framework": "DeepSpeed", "differences": [{"name": "<p>", "kind": "weight", "what": "value", "detail": "x"}]
    }  # fmt: skip
    page = html_page(document(recompute=measured(), native={"a": native}))
    assert "<svg" in page
    assert "Native run of a: DeepSpeed" in page
    assert "75%" in page
    for name in ("&lt;i&gt;run", "a &lt;note&gt;", "&lt;p&gt;"):
        assert name in page
    assert "<script" not in page
    assert "http" not in page


def test_the_picture_s_bars_are_shares_of_the_largest():
    made = picture(measured())
    peaks = [b.width for b in made.bars if b.colour == made.bars[0].colour]
    assert peaks[0] == 4 * peaks[1]
    assert len(made.bars) == 6


def test_the_text_says_what_was_saved_and_what_differs(capsys):
    show_recompute(measured())
    assert "equal under all policies" in capsys.readouterr().out
    show_recompute(measured(equal=False))
    said = capsys.readouterr().out
    assert "NOT EQUAL: gradients differ under full, first in <b>w" in said
    assert "75%" in said


def test_the_text_of_a_native_run(capsys):
    run = {
        "framework": "Lightning", "version": "2", "ranks": 2, "device": "cpu", "backend": "gloo", "losses": [4.5],
        "pickles": {"clean": True, "files": 7}, "notes": ["n"], "tolerance": {"mode": "tolerance", "loss": 2e-5},
        "equal": True, "differences": [],
    }  # fmt: skip
    other = {**run, "equal": False, "differences": [{"name": "", "kind": "loss", "what": "value", "detail": "1 and 2"}]}
    show_native({"a": run, "b": other, "between": {**other, "tolerance": {"mode": "bits"}}})
    said = capsys.readouterr().out
    assert "native a: Lightning 2, 2 ranks on cpu, gloo: 4.5" in said
    assert "7 files scanned" in said
    assert "equal to verify's own steps" in said
    assert "not equal to each other: 1 differences" in said


@pytest.mark.parametrize("word", ["html", "html=", "svg=x.svg", "png", "png=no/such/folder.png"])
def test_what_cannot_be_written_is_a_mistake_of_usage(word):
    with pytest.raises(Usage):
        verify_files([word], has_picture=True)


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(Usage, match="--recompute"):
        verify_files(["png=x.png"], has_picture=False)


def test_the_files_are_written(tmp_path):
    words = [f"png={tmp_path / 'a.png'}", f"html={tmp_path / 'a.html'}"]
    write_verify_files(document(recompute=measured()), verify_files(words, has_picture=True))
    assert dots((tmp_path / "a.png").read_bytes())
    assert "<svg" in (tmp_path / "a.html").read_text()


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    files = verify_files([f"html={tmp_path / 'a.html'}"], has_picture=False)
    (tmp_path / "a.html").mkdir()
    with pytest.raises(CkptError, match="cannot be written"):
        write_verify_files(document(), files)
