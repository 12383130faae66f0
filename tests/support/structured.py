"""Structured suites for CHAIN: the model is steered by logit_bias, since no words could."""

import json
from typing import Any

from schemas.policy import StructuredRule
from schemas.suite import StructuredSuite
from tests.support.chain import token

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
JSON_FEATURES = {"features": ["chat", "completions", "json_schema", "logprobs", "streaming"]}


def ranked(ranking: str) -> list[dict[str, Any]]:
    """Return a logit_bias that prefers some characters, best first, and avoids white space."""
    characters = ranking + "".join(one for one in '{[":' if one not in ranking)
    wanted = [{"token": token(one), "bias": str(1000 - 50 * rank)} for rank, one in enumerate(characters)]
    return wanted + [{"token": token(one), "bias": "-1000"} for one in " \n\t\r"]


def item(
    identity: str = "number",
    schema: dict[str, Any] | None = None,
    *,
    valid: tuple[str, ...] = ('{"n":1}',),
    invalid: tuple[str, ...] = ('{"n":"1"}',),
    ranking: str | None = "}1",
    max_tokens: int = 32,
) -> dict[str, Any]:
    """Return the JSON of one item; without a `ranking` the model is left to itself."""
    body: dict[str, Any] = {
        "id": identity,
        "json_schema": json.dumps(NUMBER if schema is None else schema, ensure_ascii=False),
        "messages": [{"role": "user", "content": "ping"}],
        "max_tokens": max_tokens,
        "valid": list(valid),
        "invalid": list(invalid),
    }
    return body if ranking is None else body | {"logit_bias": ranked(ranking)}


def suite_body(*items: dict[str, Any], repeats: int = 299) -> dict[str, Any]:
    """Return the JSON of a structured suite; of one item when none is given."""
    return {
        "schema": StructuredSuite.SCHEMA_ID,
        "name": "structured",
        "items": list(items) or [item()],
        "repeats": repeats,
    }


def suite(*items: dict[str, Any], repeats: int = 299) -> StructuredSuite:
    """Return a structured suite."""
    return StructuredSuite.model_validate(suite_body(*items, repeats=repeats))


def rule_body(suite_digest: str, **changes: Any) -> dict[str, Any]:
    """Return the JSON of the rule that 299 answers can prove."""
    body = {
        "gate": "structured",
        "suite": suite_digest,
        "validity_min": "0.99",
        "truncation_max": "0.01",
        "whitespace_max": "0.2",
        "whitespace_run_bytes": 64,
        "compile_cold_ms": 2000,
        "compile_warm_ms": 1000,
        "answer_seconds": "60",
    }
    return body | changes


def rule(suite_digest: str, **changes: Any) -> StructuredRule:
    """Return the rule."""
    return StructuredRule.model_validate(rule_body(suite_digest, **changes))
