"""Reading from the loopback Hub in this process: huggingface_hub pointed at it, and made-up repositories to read."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.hub_server import HubServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that huggingface_hub asks in this process, with a user's token and a home of its own."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    from ckptctl.remote import hub as adapter

    with HubServer(tmp_path / "hub") as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
        _once(close_session)
        yield server
        adapter.forget()


@functools.cache
def _once(close_session: Callable[[], None]) -> None:
    """Let huggingface_hub make its client anew, now that no proxy is on the way; one client does for all tests."""
    close_session()


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """A safetensors file of float32 tensors, written by hand."""
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(v.astype("<f4").tobytes() for v in tensors.values())


def sharded(shards: int, rows: int, seed: int = 0) -> dict[str, bytes]:
    """A repository of so many shards, each with one float32 tensor of (rows, 256) and a small one."""
    rng = np.random.default_rng(seed)
    files, where = {}, {}
    for i in range(1, shards + 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        tensors = {
            f"layers.{i}.weight": rng.standard_normal((rows, 256), np.float32),
            f"layers.{i}.bias": rng.standard_normal(7, np.float32),
        }
        files[file] = safetensors(tensors)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": shards * (rows * 1024 + 28)}, "weight_map": where}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}"}


def written(files: dict[str, bytes], folder: Path) -> Path:
    """The same files in a folder of this machine."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
