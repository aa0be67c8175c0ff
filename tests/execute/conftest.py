"""Waiting for the disk takes seconds on a busy machine, and says nothing in a test: os.fsync only counts here."""

import os

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """The descriptors' targets that were synced, by path, in order."""
    seen = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.readlink(f"/proc/self/fd/{fd}")))
    return seen
