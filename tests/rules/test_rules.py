"""The rules as data: codes and kinds are unique, every code of a reader has one, every page says what the data say."""

from __future__ import annotations

import re

import pytest

from ckptctl.core import errors
from ckptctl.rules import SEVERITIES, finding, from_error, rules
from ckptctl.rules.pages import pages
from tests.support.checkpoints import ROOT

KINDS = {r.kind for r in rules()}
# What commands say about their own flags, targets and machine; no file has such a fault.
OF_COMMANDS = {
    "usage", "failed", "state-not-carried", "no-space", "source-changed", "interrupted", "mismatch", "missing-fact",
    "dtype-not-in-target", "adapter-order", "adapter-orientation", "adapter-shape", "adapter-type", "adapter-unmatched",
    "busy", "merge-and-split", "merge-base", "model-config", "names-unknown", "no-memory", "part-missing",
    "plan-incomplete", "unsafe-path", "write-failed", "internal", "system", "groups-differ", "scalars-differ",
    "compressed-corrupt", "config-shape-mismatch", "mapping", "mesh-does-not-divide",
    "module-prefix", "several-models", "family-unknown", "key-map", "key-map-unmapped",
    "in-place", "needs-yes", "not-written", "steps-differ", "like-differs", "check-failed", "damaged-state",
    "hub-differs", "hub-not-here", "hub-refused", "model-unknown", "native-failed", "native-timeout", "native-unknown",
    "needs-install", "no-device", "no-language-model", "pickle-not-clean", "remote-code", "shape-mismatch",
    "weights-missing", "verify-differs", "layer-names", "in-use", "universal-stage-3",
    "config-weights-missing",
}  # fmt: skip
_CODE = re.compile(
    r"""(?:code=|CODE = |\.note\(\s*|_problem\([\w.]+, |bad\([^()]*, )"([a-z][a-z0-9]*(?:-[a-z0-9]+)+)\""""
)


def codes_in(folder: str) -> set[str]:
    found: set[str] = set()
    for path in sorted((ROOT / "ckptctl" / folder).rglob("*.py")):
        found |= set(_CODE.findall(path.read_text()))
    return found


def test_codes_and_kinds_are_unique_and_rise():
    codes = [r.code for r in rules()]
    assert codes == sorted(set(codes))
    assert len(KINDS) == len(codes)
    assert all(re.fullmatch(r"CK[0-8]\d\d", c) for c in codes)


def test_every_rule_says_all_that_it_must():
    for r in rules():
        assert r.severity in SEVERITIES
        assert r.question in ("intact", "safe", "resumable")
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", r.kind)
        assert r.title.strip()
        assert r.cause.endswith(".")
        assert r.cure.endswith(".")


@pytest.mark.parametrize("folder", ["formats", "operations", "names"])
def test_every_code_of_a_reader_has_a_rule(folder):
    lacking = codes_in(folder) - KINDS - OF_COMMANDS
    if lacking:  # readers that are being added bring theirs; the finding still has its slug, under a general rule
        pytest.fail(f"no rule in rules.toml for {sorted(lacking)}")


def test_the_kinds_of_checks_have_rules():
    assert codes_in("operations/checks") <= KINDS
    assert {"not-finite", "tied-tensors-differ", "masters-differ"} <= codes_in("operations/checks")


@pytest.mark.parametrize("cls", [errors.Damaged, errors.MissingFile, errors.Unsupported, errors.Unsafe])
def test_a_code_without_a_rule_keeps_its_slug(cls):
    made = from_error(cls("what", where="a.bin, w", why="why", code="never-heard-of"), "a.bin")
    assert made.kind == "never-heard-of"
    assert made.rule.kind == cls.code
    assert (made.where.file, made.where.tensor) == ("a.bin", "w")


def test_a_finding_of_a_kind_without_a_rule_is_a_mistake():
    with pytest.raises(KeyError):
        finding("never-heard-of", "x")


def test_a_fingerprint_is_of_the_place_and_not_of_the_values():
    a = finding("not-finite", "one", tensor="w", why="1 NaN")
    assert a.fingerprint == finding("not-finite", "two", tensor="w", why="9 NaN").fingerprint
    assert a.fingerprint != finding("not-finite", "one", tensor="v").fingerprint
    assert a.fingerprint != a.of("runs/step_2").fingerprint


def test_every_rule_has_its_page_and_no_page_is_left_over():
    folder = ROOT / "docs" / "rules"
    assert {p.name: p.read_text() for p in folder.glob("*.md")} == pages(), (
        "make them anew: python -m ckptctl.rules.pages docs/rules"
    )
