"""Says what the static gate found to other programs: JSON, JUnit's XML, and SARIF."""

from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from gates.static.catalogue import CODES
from gates.static.examine import CHECKS, Examined
from gates.static.flaw import Flaw
from schemas import VERSION
from schemas.result import Severity

_LEVELS = {Severity.BLOCK: "error", Severity.WARN: "warning", Severity.INFO: "note"}


def as_json(examined: Examined) -> dict[str, Any]:
    """Return verdict, findings and what was inferred."""
    return {
        "verdict": examined.verdict.value,
        "findings": [one.as_json() for one in examined.flaws],
        "inferred": examined.inferred,
    }


def errored(reason: str) -> dict[str, Any]:
    """Return the report of a run that could not look."""
    return {"verdict": "errored", "findings": [], "inferred": {}, "reason": reason}


def as_junit(examined: Examined, name: str) -> bytes:
    """Return a JUnit report: a case for each finding, failed when it blocks, and one for each check without any."""
    suite = ET.Element("testsuite", name=_clean(f"sluicegate static {name}"))
    for one in examined.flaws:
        case = ET.SubElement(suite, "testcase", classname=CODES[one.code].noun, name=_clean(_title(one)))
        body = _clean(f"{one.message}\n{one.advice}")
        if one.severity is Severity.BLOCK:
            failure = ET.SubElement(case, "failure", type=one.code, message=_clean(one.message))
            failure.text = body
        else:
            ET.SubElement(case, "system-out").text = f"{one.severity.value}: {body}"
    spoken = {CODES[one.code].noun for one in examined.flaws}
    for check in CHECKS:
        if check not in spoken:
            ET.SubElement(suite, "testcase", classname=check, name=check)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(sum(1 for one in examined.flaws if one.severity is Severity.BLOCK)))
    suite.set("errors", "0")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _title(one: Flaw) -> str:
    return " ".join(part for part in (one.code, one.file, one.pointer) if part)


def as_sarif(examined: Examined) -> dict[str, Any]:
    """Return a SARIF log. Source: OASIS, SARIF 2.1.0."""
    used = sorted({one.code for one in examined.flaws})
    rules = [
        {
            "id": code,
            "shortDescription": {"text": CODES[code].says},
            "help": {"text": CODES[code].advice},
            "properties": {"tags": [CODES[code].noun]},
        }
        for code in used
    ]
    driver = {"name": "sluicegate", "version": VERSION, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(one, used) for one in examined.flaws]}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _result(one: Flaw, used: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.code,
        "ruleIndex": used.index(one.code),
        "level": _LEVELS[one.severity],
        "message": {"text": f"{one.message} {one.advice}"},
        "properties": {"found": one.found, "expected": one.expected},
    }
    location: dict[str, Any] = {}
    if one.file is not None:
        location["physicalLocation"] = {"artifactLocation": {"uri": quote(one.file)}}
    if one.pointer is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": one.pointer}]
    if location:
        result["locations"] = [location]
    return result


def _clean(text: str) -> str:
    """Return text that XML can hold."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\ufffd" for mark in text)


def markdown() -> str:
    """Return the catalogue as a table, as README.md has it."""
    lines = ["| code | about | weighs | says | do |", "|---|---|---|---|---|"]
    for name, code in CODES.items():
        weights = ", ".join(severity.value for severity in code.severities)
        lines.append(f"| `{name}` | {code.noun} | {weights} | {code.says} | {code.advice} |")
    return "\n".join(lines) + "\n"
