"""Reports for machines against their schemas: our own short ones, and the standard's where it is given.

CKPTCTL_SARIF_SCHEMA names a copy of the standard's own schema (sarif-schema-2.1.0.json), which may not lie here.
"""

from __future__ import annotations

import copy
import json
import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ckptctl.operations import Validation, validate
from ckptctl.report.findings import gitlab, junit, sarif
from tests.report.schemas import GITLAB, SARIF
from tests.support.checkpoints import FIXTURES
from tests.support.saving import torch_save

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Everything that is broken, alone and together; nothing found; names that are hostile."""
    broken = sorted(p for p in (FIXTURES / "broken").iterdir() if p.name not in ("README.md", "expect.json"))
    made = [validate([p], Validation("values")) for p in broken]
    odd = tmp_path_factory.mktemp("odd names %41") / 'a b"<&>é.pt'
    torch_save(odd, {"w\x1b[31m\n::error::<script>|`%0A\x00\ud800": np.full((2, 2), np.nan, np.float32)})
    return [*made, validate(broken, Validation("structure")), validate([odd], Validation("values"))]


def faults(schema, value):
    validator = jsonschema.Draft7Validator(schema)
    return [f"{'/'.join(map(str, e.path))}: {e.message[:200]}" for e in validator.iter_errors(value)]


def test_sarif_is_what_the_standard_allows(documents):
    for document in documents:
        log = json.loads(sarif(document))
        assert faults(SARIF, log) == []
        (run,) = log["runs"]
        ids = [r["id"] for r in run["tool"]["driver"]["rules"]]
        assert all(ids[r["ruleIndex"]] == r["ruleId"] for r in run["results"])
        assert len(run["results"]) == len(document["findings"])
    assert sum(len(d["findings"]) for d in documents) > 150


@pytest.mark.skipif(not os.environ.get("CKPTCTL_SARIF_SCHEMA"), reason="CKPTCTL_SARIF_SCHEMA names no schema")
def test_sarif_is_valid_by_the_standard_s_own_schema(documents):
    schema = json.loads(Path(os.environ["CKPTCTL_SARIF_SCHEMA"]).read_text())
    validator = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
    for document in documents:
        assert [e.message for e in validator.iter_errors(json.loads(sarif(document)))] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.update(version="2.0.0"),
        lambda log: log["runs"][0]["results"][0].update(level="fatal"),
        lambda log: log["runs"][0]["results"][0].pop("message"),
        lambda log: log["runs"][0]["results"][0].update(extra=1),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
        lambda log: log["runs"][0]["tool"]["driver"]["rules"].append(log["runs"][0]["tool"]["driver"]["rules"][0]),
    ],
)
def test_the_schema_lets_nothing_else_through(documents, change):
    log = json.loads(sarif(next(d for d in documents if d["findings"])))
    assert faults(SARIF, log) == []
    changed = copy.deepcopy(log)
    change(changed)
    assert faults(SARIF, changed)


def test_gitlab_s_report_is_what_its_documentation_says(documents):
    for document in documents:
        report = json.loads(gitlab(document))
        assert faults(GITLAB, report) == []
        assert len(report) == len(document["findings"])
        assert [k for k, n in Counter(i["fingerprint"] for i in report).items() if n > 1] == []


def test_junit_has_the_elements_and_attributes_that_readers_take(documents):
    """As Jenkins' and GitLab's readers have it: suites of cases; failures and output are inside a case."""
    allowed = {
        "testsuites": {"name", "tests", "failures", "errors"},
        "testsuite": {"name", "tests", "failures", "errors"},
        "testcase": {"classname", "name"},
        "failure": {"type", "message"},
        "system-out": set(),
    }
    parents = {"testsuite": "testsuites", "testcase": "testsuite", "failure": "testcase", "system-out": "testcase"}
    for document in documents:
        text = junit(document)
        root = ET.fromstring(text)
        assert root.tag == "testsuites"
        for parent in root.iter():
            assert set(parent.attrib) == allowed[parent.tag]
            assert all(parents[child.tag] == parent.tag for child in parent)
        for suite in root:
            assert int(suite.get("tests")) == len(suite)
            assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
        assert not re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]", text)
