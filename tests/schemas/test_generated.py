"""What is committed for other languages is what the code says now."""

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter

from registry.api.__main__ import main as api_main
from registry.api.__main__ import render as openapi
from registry.api.app import assemble
from schemas import VERSION
from schemas.__main__ import FOLDER, render
from schemas.__main__ import main as schemas_main
from schemas.bundle import Bundle
from schemas.common import Wire
from schemas.policy import Policy
from schemas.reference import Reference
from schemas.suite import GoldenSuite, LoadSpec, LoadSuite, StructuredSuite
from tests.support.factories import bundle_body, golden_body, load_body, load_spec_body, policy_body, reference_body
from tests.support.structured import suite_body

ROOT = Path(__file__).parents[2]
OPENAPI = FOLDER / "openapi.json"
GOLDEN = GoldenSuite.model_validate(golden_body())
DOCUMENTS = [
    (Bundle, bundle_body()),
    (Policy, policy_body()),
    (GoldenSuite, golden_body()),
    (LoadSuite, load_body()),
    (LoadSpec, load_spec_body()),
    (StructuredSuite, suite_body()),
    (Reference, reference_body(GOLDEN, "sha256:" + "0" * 64)),
]


@pytest.mark.parametrize("name", render())
def test_a_committed_json_schema_is_what_the_model_says(name):
    assert (FOLDER / name).read_text() == render()[name], "run `make schemas`"


def test_a_process_describes_the_interface_once():
    """It takes a second, and whoever sends a first wrong message waits for it."""
    assert assemble().openapi() is assemble().openapi()


def test_the_committed_openapi_document_is_what_the_routes_say():
    assert OPENAPI.read_text("utf-8") == openapi(), "run `make schemas`"


def test_nothing_else_is_committed_beside_them():
    assert {path.name for path in FOLDER.iterdir()} == {*render(), OPENAPI.name}


def test_the_checks_see_a_stale_file(tmp_path, capsys):
    assert schemas_main(["--check"]) == 0
    path = tmp_path / "openapi.json"
    assert api_main(["--openapi", str(path), "--check"]) == 1
    assert "is stale; run `make schemas`" in capsys.readouterr().err
    assert api_main(["--openapi", str(path)]) == 0
    assert api_main(["--openapi", str(path), "--check"]) == 0


@pytest.mark.parametrize(("model", "body"), DOCUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_committed_json_schema_accepts_what_the_model_accepts_and_is_as_closed(model, body):
    schema = json.loads((FOLDER / f"{model.__name__}.schema.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.check_schema(schema)
    TypeAdapter(model).validate_python(body)
    assert validator.is_valid(body)
    assert not validator.is_valid({**body, "unknown": 1})
    required = "schema" if "schema" in body else "name"
    assert not validator.is_valid({key: value for key, value in body.items() if key != required})


def test_every_reference_in_the_openapi_document_leads_somewhere():
    document = json.loads(OPENAPI.read_text("utf-8"))
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', OPENAPI.read_text("utf-8")))
    assert named <= set(document["components"]["schemas"])
    assert document["info"]["version"] == VERSION


def _subclasses(model):
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


def test_what_the_service_answers_has_no_defaults_so_that_clients_see_every_field():
    models = [model for model in _subclasses(Wire) if model.__module__.startswith("schemas.")]
    assert len(models) > 20
    defaulted = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.is_required()
    ]
    assert defaulted == []


def test_every_field_is_described():
    lacking = [
        f"{model.__name__}.{name}"
        for model in _subclasses(Wire.__base__)
        if model.__module__.startswith("schemas.")
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert lacking == []


def test_the_version_is_that_of_the_distribution():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
