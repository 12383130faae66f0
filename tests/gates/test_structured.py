"""The structured gate on the real engine: what llama.cpp enforces passes, what it ignores is named.

The table of keywords holds for xllamacpp 2026.10.11549; a new version that changes a row shows here.
"""

import json
from dataclasses import replace

import pytest

from gates import catalog, structured_client
from gates.dialects.base import Capability
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.keyword_probes import PROBES, pushes
from schemas.policy import IntegrityRule
from schemas.result import Severity, Verdict
from tests.support import chain, served
from tests.support.scripted_engine import Script, scripted_engine
from tests.support.structured import JSON_FEATURES, NUMBER, item, rule, suite

MULTIPLE = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}, "required": ["n"]}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
WORD = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}
NOT_ENFORCED = {
    *("uniqueItems", "multipleOf", "contains", "minProperties", "propertyNames", "dependentRequired", "not"),
    "pattern+maxLength",
    "pattern+minLength",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with served.served(
        tmp_path_factory.mktemp("chain"), IntegrityRule(gate="integrity"), serving=JSON_FEATURES
    ) as context:
        yield context


def run(context, given, **limits):
    result, raw = catalog.run("structured", served.with_suite(context, given, rule=rule(given.digest, **limits)))
    assert catalog.recompute(raw, given, None, context.bundle) == result
    return result, json.loads(raw)["records"]


def codes(result):
    return {one.code for one in result.findings if one.severity is Severity.BLOCK}


def measured(result, name):
    (found,) = [one for one in result.measurements if one.name == name]
    return found


def test_299_valid_answers_pass_and_say_how_many_they_are(engine):
    result, records = run(engine, suite())
    assert result.verdict is Verdict.PASSED, result.summary
    valid, cut = measured(result, "valid"), measured(result, "cut")
    assert (valid.k, valid.n) == (299, 299)
    assert valid.low > valid.limit == 0.99
    assert (cut.k, cut.n) == (0, 299)
    assert cut.high < cut.limit == 0.01
    assert [(one.code, one.severity) for one in result.findings] == [("logit-bias-used", Severity.INFO)]
    assert {one["answer"]["text"] for one in records["items"][0]["answers"]} == {'{"n":1}'}
    assert {one["keyword"] for one in records["probes"]} == {"additionalProperties", "properties", "required", "type"}


def test_298_valid_answers_are_inconclusive(engine):
    result, _ = run(engine, suite(repeats=298))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "298 of 298" in result.summary


@pytest.mark.parametrize(
    ("keyword", "given", "answer"),
    [
        ("multipleOf", item("m", MULTIPLE, valid=('{"n":7}',), invalid=('{"n":1}',)), '{"n":1}'),
        ("uniqueItems", item("u", UNIQUE, valid=("[1,2]",), invalid=("[1,1]",), ranking="],7"), "[7,7]"),
    ],
)
def test_a_keyword_that_the_engine_ignores_fails_and_is_named(engine, keyword, given, answer):  # C103
    result, _ = run(engine, suite(given, repeats=3))
    assert result.verdict is Verdict.FAILED
    assert {"keyword-ignored", "keyword-broken", "answers-invalid"} == codes(result)
    named = [one for one in result.findings if one.code == "keyword-ignored"]
    assert [(one.pointer, one.found) for one in named] == [(keyword, answer)]
    assert (measured(result, f"keyword {keyword}").k, measured(result, f"keyword {keyword}").n) == (0, 3)
    assert (measured(result, "keyword type").k) == 3


def test_an_ignored_keyword_fails_even_where_no_answer_breaks_it(engine):
    # The answers keep to it by chance; the probe does not.
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 1}}, "required": ["n"]}
    result, _ = run(engine, suite(item("m", schema, invalid=('{"n":1.5}',))))
    assert result.verdict is Verdict.FAILED
    assert codes(result) == {"keyword-ignored"}
    assert (measured(result, "valid").k, measured(result, "valid").n) == (299, 299)


def test_a_pair_of_keywords_of_which_each_alone_holds_fails(engine):  # C104
    result, _ = run(engine, suite(item("w", WORD, valid=('"abc"',), invalid=('"abcabcabc"',), ranking='a"'), repeats=3))
    assert result.verdict is Verdict.FAILED
    assert codes(result) == {"keyword-ignored", "answers-endless"}
    assert result.findings[0].pointer == "pattern+maxLength"
    for alone in ({"maxLength": 8}, {"maxLength": 8, "minLength": 2}):
        given = item("w", {"type": "string", **alone}, valid=('"abc"',), invalid=('"abcabcabc"',), ranking='a"')
        result, _ = run(engine, suite(given, repeats=3))
        assert result.verdict is Verdict.INCONCLUSIVE, result.summary


@pytest.mark.parametrize("keyword", sorted(PROBES))
def test_every_probe_tells_what_this_engine_does_with_its_keyword(engine, keyword):
    probe = PROBES[keyword]
    # The contract uses the probe's own schema: instances are not looked at here, the finding is.
    given = suite(
        item(
            "k",
            dict(probe.schema),
            valid=(GOOD.get(keyword, '{"n":50}'),),
            invalid=("17",),
            ranking=probe.ranking,
            max_tokens=48,
        ),
        repeats=1,
    )
    result, records = run(engine, given)
    ignored = {one.pointer for one in result.findings if one.code == "keyword-ignored"}
    assert (keyword in ignored) == (keyword in NOT_ENFORCED), [one["answer"] for one in records["probes"]]
    assert not [one for one in result.findings if one.code in {"keyword-unproved", "suite-unfit"}]


GOOD = {
    **dict.fromkeys(("type", "properties", "required", "additionalProperties", "minimum", "$ref", "not"), '{"n":60}'),
    **dict.fromkeys(("enum", "const", "pattern"), '{"n":"a"}'),
    **dict.fromkeys(("minLength", "maxLength", "pattern+maxLength", "pattern+minLength"), '{"n":"abcd"}'),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), '{"n":4}'),
    **dict.fromkeys(("anyOf", "multipleOf"), '{"n":7}'),
    **dict.fromkeys(("items", "maxItems", "uniqueItems"), "[1,2]"),
    "minItems": "[1,2,3]",
    "contains": "[5]",
    "format": '{"n":"2026-11-29"}',
    "minProperties": '{"a":1}',
    "propertyNames": '{"x":1}',
    "dependentRequired": '{"a":1,"b":2}',
}


def test_a_model_that_pads_with_white_space_fails(engine):
    result, _ = run(engine, suite(item(ranking=None), repeats=5), whitespace_run_bytes=16)
    assert result.verdict is Verdict.FAILED
    assert "whitespace-flood" in codes(result)
    assert measured(result, "whitespace_run").value > 16


def test_answers_that_are_cut_are_neither_valid_nor_invalid(engine):  # C107
    result, records = run(engine, suite(item(max_tokens=3), repeats=4))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "4 of 4 answers were cut" in result.summary
    assert (measured(result, "valid").k, measured(result, "valid").n) == (4, 4)
    first = records["items"][0]["answers"][0]
    assert (first["answer"]["finish_reason"], first["answer"]["text"]) == ("length", '{"n')
    assert first["again"]["text"] == '{"n":1}'


def test_a_schema_that_the_engine_refuses_fails(engine):
    schema = {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}
    result, _ = run(engine, suite(item("p", schema, valid=("[1]",), invalid=("[1,2]",)), repeats=2))
    assert result.verdict is Verdict.FAILED
    assert "schema-refused" in codes(result)


def test_a_keyword_without_a_probe_asks_for_acceptance(engine):
    schema = NUMBER | {"dependentSchemas": {"n": {"type": "object"}}}
    result, _ = run(engine, suite(item("d", schema)))
    assert result.verdict is Verdict.PASSED, result.summary
    warned = [one.pointer for one in result.findings if one.severity is Severity.WARN]
    assert warned == ["dependentSchemas"]


def test_an_engine_that_cannot_be_pushed_leaves_keywords_unproved(engine):
    dialect = replace(LLAMACPP, capabilities=LLAMACPP.capabilities - {Capability.LOGIT_BIAS})
    quiet = replace(engine, endpoint=Endpoint(engine.endpoint.base_url, engine.endpoint.model, dialect))
    result, _ = run(quiet, suite(item(ranking=None), repeats=1), whitespace_max="0.99")
    assert {one.pointer for one in result.findings if one.code == "keyword-unproved"} == {
        *("additionalProperties", "properties", "required", "type"),
    }
    result, _ = run(quiet, suite())
    assert result.verdict is Verdict.ERRORED
    assert "logit_bias" in result.summary


def limited(engine, limit):
    dialect = replace(LLAMACPP, bias_limit=limit)
    return replace(engine, endpoint=Endpoint(engine.endpoint.base_url, engine.endpoint.model, dialect))


def test_a_push_keeps_its_order_within_what_an_engine_adds():
    assert pushes(None) == (1000.0, 50.0, -1000.0)
    push, step, avoid = pushes(100.0)
    longest = max(len(probe.characters()) for probe in PROBES.values())
    pushed = [push - step * rank for rank in range(longest)]
    assert (max(pushed), min(pushed), avoid) == (100.0, pushed[-1], -100.0)
    assert min(pushed) > 0
    assert len(set(pushed)) == longest


def test_a_keyword_that_is_not_enforced_is_named_by_a_smaller_push_too(engine):
    """Under a push that the engine cuts all characters weigh alike, and the schema is kept by chance."""
    given = suite(item("u", UNIQUE, valid=("[1,2]",), invalid=("[1,1]",), ranking=None), repeats=1)
    result, _ = run(limited(engine, 100.0), given)
    assert "uniqueItems" in {one.pointer for one in result.findings if one.code.startswith("keyword-")}
    assert result.verdict is Verdict.FAILED


def test_a_suite_that_pushes_more_than_an_engine_adds_is_errored(engine):
    result, _ = run(limited(engine, 100.0), suite())
    assert result.verdict is Verdict.ERRORED
    assert "a logit_bias of 1000, and this engine cuts it at 100" in result.summary


def test_a_bundle_that_does_not_promise_schemas_fails(tmp_path):
    with served.served(tmp_path / "case", IntegrityRule(gate="integrity")) as context:
        result, _ = run(context, suite(repeats=1))
    assert result.verdict is Verdict.FAILED
    assert codes(result) == {"json-schema-not-declared"}


async def test_an_engine_that_ignores_the_schema_fails(engine):  # C100
    plain = {"object": "chat.completion", "model": "scripted"}
    usage = {"prompt_tokens": 23, "completion_tokens": 3}
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    async with scripted_engine(
        {"/v1/chat/completions": Script.json(plain | {"choices": [choice], "usage": usage})}
    ) as stub:
        asked = served.with_suite(engine, given := suite(item(ranking=None), repeats=2), rule=rule(given.digest))
        endpoint = Endpoint(stub.base_url, "scripted", LLAMACPP)
        session = structured_client._Session(replace(asked, endpoint=endpoint), endpoint, 5.0)
        records = await session.measure(given, set(), can_push=True)
    result, _ = catalog.conclude("structured", asked, records, duration_ms=1)
    assert result.verdict is Verdict.FAILED
    assert "schema-ignored" in codes(result)
    assert "truncation-hidden" in codes(result)
    assert chain.ANSWER == "Hi"
