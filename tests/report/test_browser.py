"""Pages as a real browser draws them: nothing overflows, words stay in their boxes, colours are there, no network.

Skips without Chromium: install it, or name one in CKPTCTL_BROWSER.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest

from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import ckptctl, good
from tests.support.saving import arange, torch_save

BROWSER = os.environ.get("CKPTCTL_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: install one, or name it in CKPTCTL_BROWSER")
WIDTH = 1280
# Appended to a copy of the page: what the browser made of it, as text in the page.
PROBE = """
<script>
const box = e => e.getBoundingClientRect(), rgb = e => getComputedStyle(e).backgroundColor;
const out = {
  overflow: document.documentElement.scrollWidth - innerWidth,
  requests: performance.getEntriesByType('resource').length,
  tiles: [...document.querySelectorAll('svg g')].map(g => {
    const r = box(g.querySelector('rect'));
    return {area: r.width * r.height, title: g.querySelector('title').textContent,
      outside: [...g.querySelectorAll('text')].filter(t => {
        const b = box(t); return b.left < r.left || b.right > r.right + 1 || b.bottom > r.bottom + 1;
      }).map(t => t.textContent)};
  }),
  svg: [...document.querySelectorAll('svg')].map(s => box(s).width * box(s).height),
  cells: [...document.querySelectorAll('.heat td')].map(c => [c.textContent, rgb(c), box(c).width * box(c).height]),
  cut: [...document.querySelectorAll('.heat th')].filter(h => h.scrollWidth > h.clientWidth + 1).length,
  headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
  items: [...document.querySelectorAll('li')].map(l => box(l).height),
};
const made = document.createElement('pre'); made.id = 'probe'; made.textContent = JSON.stringify(out);
document.body.append(made);
</script>
"""


def browser(*words, size=(WIDTH, 1600)):
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    command = [BROWSER, *quiet, f"--window-size={size[0]},{size[1]}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.decode()


def probed(page):
    copy = page.with_name("probe.html")
    copy.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    dom = browser("--dump-dom", copy.as_uri())
    text = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)[1]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def pixels(path):
    """A PNG of eight bits a channel as (height, width, channels)."""
    data, at, body = path.read_bytes(), 8, b""
    while at < len(data):
        n, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", data, at + 8)
        body += data[at + 8 : at + 8 + n] if kind == b"IDAT" else b""
        at += 12 + n
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.int64)
    for y, row in enumerate(rows):
        line, above = row[1:].astype(np.int64), out[y - 1] if y else np.zeros(width * channels, np.int64)
        if row[0] in (0, 2):
            out[y] = (line + (above if row[0] else 0)) & 255
            continue
        for x in range(width * channels):
            left, up = (out[y, x - channels] if x >= channels else 0), above[x]
            corner = above[x - channels] if x >= channels else 0
            if row[0] == 1:
                guess = left
            elif row[0] == 3:
                guess = (left + up) // 2
            else:
                p = left + up - corner
                guess = min((left, up, corner), key=lambda v: abs(p - v))
            out[y, x] = (line[x] + guess) & 255
    return out.reshape(height, width, channels)


def well_drawn(seen):
    assert seen["overflow"] <= 0
    assert seen["requests"] == 0
    assert [t for t in seen["tiles"] if t["outside"]] == []
    assert all(area > 0 for _, _, area in seen["cells"])
    assert all(height > 0 for height in seen["items"])
    assert seen["cut"] == 0


@pytest.mark.parametrize("name", ["torch/fsdp2_tp2x2_dcp", "megatron/legacy_tp2pp2_distopt_dp2", "hf/mixtral-trainer"])
def test_inspect_s_page_is_drawn(name, tmp_path):
    page = tmp_path / "p.html"
    config = truth_config(name)
    good("inspect", ckpt(name), "--output", f"html={page}", *(() if config is None else ("--model-config", config)))
    seen = probed(page)
    well_drawn(seen)
    areas = sum(t["area"] for t in seen["tiles"])
    assert areas == pytest.approx(seen["svg"][0], rel=0.02)
    largest = max(seen["tiles"], key=lambda t: t["area"])
    assert largest["area"] / areas > 1.5 / len(seen["tiles"])
    assert len({t["title"] for t in seen["tiles"]}) == len(seen["tiles"])
    assert {"Training state", "Which file holds what", "Findings"} <= set(seen["headings"])
    assert len({colour for _, colour, _ in seen["cells"]}) > 1


def test_diff_s_heat_map_goes_from_green_to_red(tmp_path):
    a = {f"layers.{i}.{m}": arange(64, start=1) for i in range(3) for m in ("q", "up")}
    b = {k: v.copy() for k, v in a.items()}
    b["layers.0.up"][2] *= 1.0001
    b["layers.1.up"] *= 1.03
    b["layers.2.q"] *= 5
    paths = [torch_save(tmp_path / f"{n}.pt", {"model": t, "scheduler": {"x": i}}) for i, (n, t) in
             enumerate((("a", a), ("b", b)))]  # fmt: skip
    page = tmp_path / "d.html"
    assert ckptctl("diff", *paths, "--state", "--output", f"html={page}").code == 1
    seen = probed(page)
    well_drawn(seen)
    drawn = [(text, tuple(map(int, re.findall(r"\d+", colour)[:3]))) for text, colour, _ in seen["cells"]]
    equal = {rgb for text, rgb in drawn if text == "="}
    heat = {int(text): rgb for text, rgb in drawn if text.lstrip("-").isdigit()}
    assert all(g > r and g > b for r, g, b in equal)
    assert sorted(heat) == [-6, -2, 0]
    greens = [heat[power][1] for power in sorted(heat)]
    assert greens == sorted(greens, reverse=True)  # hotter is redder
    assert all(r > b for r, _, b in heat.values())
    browser(f"--screenshot={tmp_path / 'd.png'}", page.as_uri(), size=(640, 700))
    picture = pixels(tmp_path / "d.png")[:, :, :3]
    assert picture.shape[1] == 640
    for rgb in (*equal, *heat.values()):
        assert (np.abs(picture - np.array(rgb)).max(axis=2) <= 2).sum() > 100
