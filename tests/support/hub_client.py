"""The real huggingface_hub client of this process, or of a process of its own, asked to talk to the loopback Hub."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import ROOT
from tests.support.hub_server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_sleep = time.sleep


def use(hub: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch, *, xet: bool = False) -> None:
    """Points the client of this process at a Hub: it reads its settings at import, so they are set there too."""
    from huggingface_hub import constants

    for name, value in hub.environment(home, xet=xet).items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that the client of this process talks to. Nobody waits for longer than a moment."""
    monkeypatch.setattr(time, "sleep", lambda seconds: _sleep(min(seconds, 0.01)))
    with HubServer(tmp_path / "hub", page=7, part_size=1 << 20) as server:
        use(server, tmp_path / "home", monkeypatch)
        yield server


def start(hub: HubServer, home: Path, *words: str | Path, xet: bool = False, **env: str) -> subprocess.Popen[str]:
    """ckptctl in a process of its own, which can be killed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTCTL_", "HF_")) and "proxy" not in k.lower()}
    return subprocess.Popen(
        [sys.executable, "-m", "ckptctl", *map(str, words)],
        cwd=ROOT,
        env={**clean, **hub.environment(home, xet=xet), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
