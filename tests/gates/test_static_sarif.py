"""What is written as SARIF is SARIF 2.1.0: its rules for the parts that are written, and what its readers go by.

Source: OASIS, SARIF 2.1.0, sections 3.13 (log), 3.14 (run), 3.18 and 3.19 (tool), 3.49 (rules), 3.27 (results), 3.28
and 3.33 (locations), 3.11 (messages): required properties, enumerations, and no property that it does not name.
"""

import json
from typing import Any

import jsonschema
import pytest

from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import examine
from gates.static.report import as_sarif
from tests.support.checkpoints import SHARDS, edit_json, micro, micro_sharded


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties alone."""
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def listed(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "uniqueItems": True}


TEXT = {"type": "string", "minLength": 1}
MESSAGE = closed(["text"], text=TEXT)
RULE = closed(
    ["id"],
    id=TEXT,
    shortDescription=MESSAGE,
    help=MESSAGE,
    properties={"type": "object", "properties": {"tags": listed(TEXT)}},
)
LOCATION = closed(
    [],
    physicalLocation=closed(
        ["artifactLocation"], artifactLocation=closed(["uri"], uri={"type": "string", "pattern": r"^[!$-;=?-Z_a-z~]+$"})
    ),
    logicalLocations=listed(closed(["fullyQualifiedName"], fullyQualifiedName={"type": "string"})),
)
RESULT = closed(
    ["message"],
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    level={"enum": ["none", "note", "warning", "error"]},
    message=MESSAGE,
    locations=listed(LOCATION),
    properties={"type": "object"},
)
DRIVER = closed(["name"], name=TEXT, version=TEXT, rules=listed(RULE))
RUN = closed(["tool"], tool=closed(["driver"], driver=DRIVER), results={"type": "array", "items": RESULT})
LOG = closed(
    ["version", "runs"],
    **{"$schema": {"const": "https://json.schemastore.org/sarif-2.1.0.json"}},
    version={"const": "2.1.0"},
    runs={"type": "array", "items": RUN, "minItems": 1},
)


def sound(root):
    return micro(root), {}


def many_flaws(root):
    """Return a folder whose flaws are of each severity, with and without file, pointer, and plain characters."""
    micro_sharded(root, total=1)
    edit_json(root / "config.json", lambda config: config.update(num_key_value_heads=3))
    (root / SHARDS[1]).rename(root / "größe 100%#?.safetensors")
    engine = {"name": "sglang", "version": "0.1", "arguments": ["--tp-size", "3", "--größe", "<&>"]}
    return root, {"engine": engine, "hardware": {"accelerator": "nvidia-h1000"}, "draft": {"method": "eagle99"}}


@pytest.mark.parametrize("made", [sound, many_flaws])
def test_the_log_keeps_to_the_rules_of_sarif(tmp_path, made):
    root, declared = made(tmp_path / "m")
    examined = examine(of_directory(root, read_declared(declared)))
    log = json.loads(json.dumps(as_sarif(examined)))
    jsonschema.Draft202012Validator.check_schema(LOG)
    jsonschema.validate(log, LOG, jsonschema.Draft202012Validator)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert [rules[one["ruleIndex"]] for one in run["results"]] == [one["ruleId"] for one in run["results"]]
    assert sorted({one["ruleId"] for one in run["results"]}) == rules
    assert len(run["results"]) == len(examined.flaws)
    assert {one["level"] for one in run["results"]} <= {"note", "warning", "error"}
    shown = [place["physicalLocation"] for place in places(run) if "physicalLocation" in place]
    uris = [place["artifactLocation"]["uri"] for place in shown]
    assert ("gr%C3%B6%C3%9Fe%20100%25%23%3F.safetensors" in uris) is (made is many_flaws)
    assert (run["results"] == []) is (made is sound)


def places(run):
    """Yield each location of each result."""
    for one in run["results"]:
        yield from one.get("locations", [])
