"""Waiting for the disk takes seconds on a busy machine, and says nothing in a test: os.fsync only counts here."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """The descriptors' targets that were synced, by path, in order."""
    seen = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    return seen
