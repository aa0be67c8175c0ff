"""Pages: one file without network or scripts, well formed, with what the documents say, and nothing that runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from ckptctl.report.html import Tile, treemap
from tests.support.checkpoints import ckpt
from tests.support.commands import ckptctl, good, refused
from tests.support.saving import arange, torch_save

VOID = {"meta", "rect"}


class Page(HTMLParser):
    """A page's tags, closed as they were opened, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def page_of(path):
    text = path.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(page.tags)
    assert not [a for a in page.attributes if a[0].startswith("on") or a[0] in ("src", "href")]
    assert not re.search(r"url\(|@import|https?:", text)
    return page


def test_inspect_s_page(tmp_path):
    good("inspect", ckpt("torch/fsdp2_dp4_dcp"), "--output", f"html={tmp_path / 'p.html'}")
    page = page_of(tmp_path / "p.html")
    for word in (
        "exp_avg",
        "model.layers.*.self_attn.q_proj.weight (float32",
        "Which part of each layer each file holds (weight)",
        "__3_0.distcp",
        "world_size 4",
        "scheduler",
    ):
        assert word in page.text


def test_diff_s_page_is_a_map_of_layers_and_modules(tmp_path):
    a = {f"layers.{i}.{m}": arange(4, start=1) for i in range(3) for m in ("q", "up")}
    b = {k: v.copy() for k, v in a.items()}
    b["layers.1.up"][2] *= 1.001
    b["layers.2.q"] = np.zeros(5, np.float32)
    paths = [torch_save(tmp_path / f"{n}.pt", {"model": t, "scheduler": {"x": {"y": i}}}) for i, (n, t) in
             enumerate((("a", a), ("b", b)))]  # fmt: skip
    assert ckptctl("diff", *paths, "--state", "--output", f"html={tmp_path / 'd.html'}").code == 1
    page = page_of(tmp_path / "d.html")
    assert page.words.count("=") == 4
    assert "-4" in page.words  # 0.003 of a norm of 5.48
    assert "different: 3 of them" in page.text
    assert page.words[page.words.index("y") :][:3] == ["y", ": ", "0 and 1"]


def test_names_of_a_hostile_file_are_text(tmp_path):
    evil = '<script>alert(1)</script>"onload=x\x1b\u202e'
    path = torch_save(tmp_path / "a.pt", {evil: arange(3)})
    good("inspect", path, "-o", f"html={tmp_path / 'p.html'}")
    assert "alert(1)" in page_of(tmp_path / "p.html").text
    other = torch_save(tmp_path / "b.pt", {evil: arange(3, start=1)})
    ckptctl("diff", path, other, "-o", f"html={tmp_path / 'd.html'}")
    assert "alert(1)" in page_of(tmp_path / "d.html").text
    assert "\x1b" not in (tmp_path / "d.html").read_text()


@pytest.mark.parametrize("word", ["html", "html=", "pdf=x", "html=/no/such/folder/x.html"])
def test_other_outputs_are_wrong_usage(word, tmp_path):
    path = torch_save(tmp_path / "a.pt", {"w": arange(3)})
    assert refused("inspect", path, "--output", word, code=2)["code"] == "usage"


def test_a_treemap_s_areas_are_the_weights():
    weights = [50, 20, 15, 9, 5, 1]
    picture = treemap([Tile(str(w), w, "#000") for w in weights], 100, 100)
    boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', picture)
    areas = [float(w) * float(h) for _, _, w, h in boxes]
    assert sorted(areas, reverse=True) == pytest.approx([100.0 * w for w in weights], rel=0.03)
    assert treemap([]) == "<p>none</p>"
