"""What reports must be, as JSON schemas written by hand: only what ckptctl writes, and nothing else is let through.

SARIF: from the text of OASIS SARIF 2.1.0 (sections named below). GitLab: docs.gitlab.com, ci/testing/code_quality.
"""

from __future__ import annotations

from typing import Any


def _closed(required: str, optional: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    assert set(properties) == {*required.split(), *optional.split()}
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = _closed("text", text=_TEXT)  # 3.11
_LEVEL = {"enum": ["none", "note", "warning", "error"]}  # 3.27.10
_URI = {"type": "string", "pattern": r"^[A-Za-z0-9._~%/-]+$", "not": {"pattern": "^/"}}  # 3.4.3, RFC 3986 relative
_RULE = _closed(  # 3.49
    "id name shortDescription fullDescription help defaultConfiguration",
    id={"type": "string", "pattern": r"^CK\d{3}$"},
    name={"type": "string", "pattern": "^[A-Z][A-Za-z0-9]*$"},
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_closed("level", level=_LEVEL),  # 3.50
)
_LOCATION = _closed(  # 3.28
    "physicalLocation",
    "logicalLocations",
    physicalLocation=_closed(  # 3.29
        "artifactLocation region",
        artifactLocation=_closed("uri", uri=_URI),
        region=_closed("startLine", startLine={"type": "integer", "minimum": 1}),  # 3.30.5
    ),
    logicalLocations={  # 3.33
        "type": "array",
        "items": _closed("fullyQualifiedName kind", fullyQualifiedName=_TEXT, kind={"enum": ["member"]}),
    },
)
_RESULT = _closed(  # 3.27
    "ruleId ruleIndex level message locations partialFingerprints",
    ruleId=_RULE["properties"]["id"],
    ruleIndex={"type": "integer", "minimum": 0},
    level=_LEVEL,
    message=_MESSAGE,
    locations={"type": "array", "minItems": 1, "items": _LOCATION},
    partialFingerprints={  # 3.27.17: names have a version at their end
        "type": "object",
        "patternProperties": {r"^[a-z]+/v\d+$": {"type": "string", "pattern": "^[0-9a-f]{32}$"}},
        "additionalProperties": False,
    },
)
SARIF = _closed(  # 3.13
    "$schema version runs",
    **{
        "$schema": {"enum": ["https://json.schemastore.org/sarif-2.1.0.json"]},
        "version": {"enum": ["2.1.0"]},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": _closed(  # 3.14
                "tool results columnKind",
                tool=_closed(  # 3.18
                    "driver",
                    driver=_closed(  # 3.19
                        "name version rules",
                        name=_TEXT,
                        version=_TEXT,
                        rules={"type": "array", "uniqueItems": True, "items": _RULE},
                    ),
                ),
                results={"type": "array", "items": _RESULT},
                columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},  # 3.14.17
            ),
        },
    },
)
GITLAB = {
    "type": "array",
    "items": _closed(
        "description check_name fingerprint severity location",
        description=_TEXT,
        check_name=_TEXT,
        fingerprint=_TEXT,
        severity={"enum": ["info", "minor", "major", "critical", "blocker"]},
        location=_closed(
            "path lines",
            path={"type": "string", "minLength": 1, "not": {"pattern": r"^(/|\./)"}},
            lines=_closed("begin", begin={"type": "integer", "minimum": 1}),
        ),
    ),
}
