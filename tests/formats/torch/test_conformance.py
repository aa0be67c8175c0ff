"""Files of torch.save: the conformance suite."""

from __future__ import annotations

import zipfile

import pytest

from tests.support.format_suite import Fault, FormatSuite, Sample
from tests.support.plain import Plain, torch_tree

SAMPLES = [Sample("torch/plain_zip", variant="zip"), Sample("torch/plain_legacy", variant="legacy")]
ZIP, LEGACY = "torch/plain_zip", "torch/plain_legacy"


def cut(by):
    return lambda path: path.write_bytes(path.read_bytes()[:by])


def swapped(old, new):
    def damage(path):
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))

    return damage


FAULTS = [
    Fault("a zip ends early", ZIP, cut(-2000), "archive-truncated"),
    Fault("a zip ends in its data", ZIP, cut(300_000), "archive-truncated"),
    Fault("a zip is its first bytes", ZIP, cut(4), "archive-truncated"),
    Fault("a zip without its pickle", ZIP, swapped(b"data.pkl", b"data.xyz"), "unrecognised"),
    Fault("a stream ends early", LEGACY, cut(-2000), "data-truncated"),
    Fault("a stream ends in its pickle", LEGACY, cut(3000), "pickle-truncated"),
    Fault("an empty file", LEGACY, cut(0), "empty-file"),
]


class TestTorch(FormatSuite):
    format = "torch"

    @pytest.fixture(params=SAMPLES, ids=lambda s: s.name.split("/")[1])
    def sample(self, request):
        return request.param

    @pytest.fixture(params=FAULTS, ids=str)
    def fault(self, request):
        return request.param

    def gaps(self, path):
        """Everything but the storages of model and optimizer, by zipfile."""
        if not zipfile.is_zipfile(path):
            return None
        tree, data = torch_tree(path), path.read_bytes()
        mine: set[str] = set()

        def visit(node):
            if isinstance(node, Plain):
                mine.add(node.storage)
            for inner in node.values() if isinstance(node, dict) else node if type(node) in (list, tuple) else ():
                visit(inner)

        visit([tree["model"], tree["optimizer"]])
        runs, at = [], 0
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda i: i.header_offset):
                _, _, key = info.filename.partition("/data/")
                if key in mine:
                    head = data[info.header_offset : info.header_offset + 30]
                    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                    first = info.header_offset + 30 + lengths
                    runs.append((at, first))
                    at = first + info.file_size
        return {path.name: [*runs, (at, len(data))]}
