"""What the committed OpenAPI document says, as schemathesis reads it, is what every role is answered."""

import copy
import json
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.openapi.checks import JsonSchemaError
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.support.api import ROLES
from tests.support.factories import created_target, registered_bundle, registered_policy
from tests.support.phases import gated

DOCUMENT = json.loads((Path(__file__).parents[2] / "schemas/generated/openapi.json").read_text("utf-8"))
CONFIG = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
schemathesis.serializer.alias("application/partial-upload", "application/octet-stream")
OPERATIONS = {
    one.definition.raw["operationId"]: one
    for one in (found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG).get_all_operations())
}
ENDLESS = {
    name for name, one in OPERATIONS.items() if "text/event-stream" in json.dumps(one.definition.raw["responses"])
}
"""Their answers go on for as long as the client listens; `test_api_fuzz` reads how they begin."""
NOTHING_TO_LIE_ABOUT = {
    name
    for name, one in OPERATIONS.items()
    if not one.definition.raw.get("parameters") and "requestBody" not in one.definition.raw
}
EXAMPLES = 3
MARK = "examined"
UNPROMISED = [positive_data_acceptance]
"""A schema cannot tell which cursors, digests and instants a registry knows of, so what fits it may be refused."""


def asked(shared_api, case, role):
    """Send a request, and hold the answer against the document, by every check but what it cannot promise."""
    headers = {"Authorization": f"Bearer {shared_api.tokens[role]}"}
    case.call_and_validate(base_url=shared_api.url, headers=headers, excluded_checks=UNPROMISED, timeout=30)


@pytest.fixture(scope="module")
def known(shared_api):
    """Path parameter → one value that exists, so that requests get past its look-ups."""
    service, actor = shared_api.service, shared_api.actor("manager")
    release = str(gated(service, actor, f"{MARK}@prod", approval={"required": 9}))
    created_target(service, actor, f"{MARK}@staging")
    shared_api.clients["admin"].post("/v1/projects", json={"name": MARK}).raise_for_status()
    return {
        "release": release,
        "target": f"{MARK}@staging",
        "bundle": registered_bundle(service, actor, MARK).digest,
        "policy": registered_policy(service, actor, MARK).digest,
        "project": MARK,
    }


@pytest.mark.parametrize("mode", list(GenerationMode), ids=[mode.value for mode in GenerationMode])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_role_is_answered_as_the_document_says(shared_api, known, name, mode):
    if name in ENDLESS or (mode is GenerationMode.NEGATIVE and name in NOTHING_TO_LIE_ABOUT):
        return

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode), is_known=st.booleans())
    def answered(case, is_known):
        if is_known and mode is GenerationMode.POSITIVE:
            case.path_parameters.update({one: known[one] for one in case.path_parameters if one in known})
        for role in ROLES:
            asked(shared_api, case, role)

    answered()


def test_a_member_that_is_not_answered_as_declared_is_found(shared_api):
    document = copy.deepcopy(DOCUMENT)
    schema = document["paths"]["/v1/version"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    changed = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    next(iter(changed["properties"].values()))["type"] = "integer"
    operation = schemathesis.openapi.from_dict(document, config=CONFIG)["/v1/version"]["get"]

    with pytest.raises(FailureGroup) as caught:
        asked(shared_api, operation.Case(), "viewer")
    assert [type(one) for one in caught.value.exceptions] == [JsonSchemaError]
