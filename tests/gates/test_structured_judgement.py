"""The structured gate's judgement, from records alone."""

import copy

import pytest

from gates.gate import JudgeInput
from gates.structured import judge
from schemas.bundle import Bundle
from schemas.result import Severity, Verdict
from tests.support.factories import bundle_body
from tests.support.structured import JSON_FEATURES, item, rule, suite

GIVEN = suite(item("a"), item("b"), repeats=200)
CONTRACT = {"served_name": "chat", "usage": "all_tokens", "cancellation": "on_disconnect", **JSON_FEATURES}
BUNDLE = Bundle.model_validate(bundle_body(serving=CONTRACT))
KEYWORDS = ("additionalProperties", "properties", "required", "type")


def answer(text='{"n":1}', **changes):
    body = {"outcome": "ok", "detail": "", "finish_reason": "stop", "text": text, "raw": None, "is_whole": True}
    return body | {"tokens": 8, "seconds": 0.1} | changes


def cut(text="{"):
    return answer(text, finish_reason="length")


def records():
    answers = [{"number": number, "answer": answer(), "again": None} for number in range(200)]
    one = {"plain_ttft_ms": [5.0, 6.0, 7.0], "schema_ttft_ms": [9.0, 7.0, 7.0, 7.0], "plain": answer("Hi")}
    items = [{"item": name, "cut": cut(), "answers": copy.deepcopy(answers), **one} for name in ("a", "b")]
    probes = [{"keyword": keyword, "problem": None, "answer": answer()} for keyword in KEYWORDS]
    return {"probes": probes, "items": items}


def verdict(change=None, **limits):
    given = records()
    if change is not None:
        change(given)
    limits = {"validity_min": "0.98", "truncation_max": "0.02"} | limits
    return judge(JudgeInput(rule(GIVEN.digest, **limits), given, BUNDLE, GIVEN))


def each(count, **changes):
    """Return a change of the first answers of item a."""

    def change(given):
        for one in given["items"][0]["answers"][:count]:
            one.update(copy.deepcopy(changes))

    return change


def blocking(judged):
    return {one.code for one in judged.findings if one.severity is Severity.BLOCK}


def test_good_records_pass():
    judged = verdict()
    assert judged.verdict is Verdict.PASSED, judged.summary
    assert not judged.findings[1:]


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        (0, Verdict.PASSED),
        (3, Verdict.PASSED),
        (4, Verdict.INCONCLUSIVE),
        (12, Verdict.INCONCLUSIVE),
        (14, Verdict.FAILED),
    ],
)
def test_invalid_answers_are_judged_by_their_share(invalid, expected):
    # Of 400 answers with a limit of 2 %: up to 3 prove it, from 14 on they refute it.
    judged = verdict(each(invalid, answer=answer('{"n":"1"}')))
    assert judged.verdict is expected, judged.summary
    assert ("answers-invalid" in blocking(judged)) == (expected is Verdict.FAILED)


@pytest.mark.parametrize(
    ("change", "expected", "code"),
    [
        (each(200, answer=answer('{"n":1')), Verdict.FAILED, "answers-invalid"),  # C107, control
        (each(1, answer=answer("Hi")), Verdict.FAILED, "schema-ignored"),
        (each(1, answer=answer("", outcome="timeout", finish_reason=None)), Verdict.FAILED, "answer-late"),
        (each(1, answer=answer("", outcome="http_5xx", finish_reason=None)), Verdict.FAILED, "request-failed"),
        (each(1, answer=answer("", outcome="http_4xx", finish_reason=None)), Verdict.FAILED, "schema-refused"),
        (each(1, answer=answer("", outcome="error_event", finish_reason=None)), Verdict.FAILED, "request-failed"),
        (each(1, answer=answer("", outcome="connect", finish_reason=None)), Verdict.ERRORED, "request-not-made"),
        (each(1, answer=answer(is_whole=False)), Verdict.ERRORED, "validators-disagree"),
        (each(1, answer=answer(raw='{"n":1}' + "\n" * 65)), Verdict.FAILED, "whitespace-flood"),
        (each(200, answer=answer(raw='{ "n" : 1 }')), Verdict.FAILED, "whitespace-share"),
        (each(20, answer=cut(), again=cut()), Verdict.FAILED, "answers-endless"),
        (lambda given: given["items"][0].update(cut=answer("{")), Verdict.FAILED, "truncation-hidden"),
        (lambda given: given["items"][0].update(schema_ttft_ms=[2100.0, 7.0, 7.0, 7.0]), Verdict.FAILED, "schema-slow"),
        (lambda given: given["items"][0].update(schema_ttft_ms=[9.0, 1100, 1100, 1100]), Verdict.FAILED, "schema-slow"),
        (lambda given: given["items"][0].update(schema_ttft_ms=[9.0, None, 7.0, 7.0]), Verdict.ERRORED, "cost-unknown"),
        (lambda given: given["items"][0].update(schema_ttft_ms=[9.0]), Verdict.ERRORED, "cost-unknown"),
        (lambda given: given["items"][0]["answers"].pop(), Verdict.ERRORED, "record-missing"),
        (lambda given: given["items"][0]["answers"][0].update(number=1), Verdict.ERRORED, "record-missing"),
        (lambda given: given["items"].pop(), Verdict.ERRORED, "record-missing"),
        (lambda given: given["probes"][0]["answer"].update(text='{"n":1,"x":1}'), Verdict.FAILED, "keyword-ignored"),
        (lambda given: given["probes"][0]["answer"].update(finish_reason="length"), Verdict.FAILED, "keyword-ignored"),
        (lambda given: given["probes"][0]["answer"].update(outcome="http_4xx"), Verdict.FAILED, "keyword-refused"),
    ],
)  # fmt: skip
def test_one_fault_decides_and_has_its_code(change, expected, code):
    judged = verdict(change)
    assert judged.verdict is expected, judged.summary
    assert code in blocking(judged)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given["probes"].pop(),
        lambda given: given["probes"][0].update(answer=None, problem="'[' is 2 tokens here"),
        lambda given: given["probes"][0]["answer"].update(outcome="http_5xx", detail="500"),
    ],
)
def test_a_keyword_that_could_not_be_probed_warns(change):
    judged = verdict(change)
    assert judged.verdict is Verdict.PASSED
    warned = [one.code for one in judged.findings if one.severity is Severity.WARN]
    assert warned == ["keyword-unproved"]


def test_cut_answers_that_end_with_more_tokens_are_inconclusive_and_count_as_valid():
    judged = verdict(each(20, answer=cut(), again=answer()))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "20 of 400 answers were cut" in judged.summary
    assert [(one.k, one.n) for one in judged.measurements if one.name == "valid"] == [(400, 400)]


def test_a_slow_machine_is_not_the_schema_s_fault():
    def change(given):
        given["items"][0] |= {"plain_ttft_ms": [5.0, 900.0, 2400.0], "schema_ttft_ms": [3100.0, 800.0, 800.0, 800.0]}

    def jump(given):
        given["items"][0] |= {"schema_ttft_ms": [9.0, 7.0, 1100.0, 1200.0]}

    for slow in (change, jump):
        judged = verdict(slow)
        assert judged.verdict is Verdict.ERRORED
        assert [one.code for one in judged.findings[:1]] == ["schema-slow"]


def test_white_space_within_a_string_is_no_padding():
    judged = verdict(each(200, answer=answer('{"n":1}', raw='{"n":"' + "a b " * 10 + '"}')))
    assert judged.verdict is Verdict.PASSED


def test_nothing_asked_is_never_passed():
    def nothing(given):
        for one in given["items"]:
            one["answers"] = []

    assert verdict(nothing).verdict is Verdict.ERRORED
    assert judge(JudgeInput(rule(GIVEN.digest), {"probes": [], "items": []}, BUNDLE, GIVEN)).verdict is Verdict.ERRORED


def test_another_suite_or_an_unfit_one_is_errored():
    assert judge(JudgeInput(rule(GIVEN.digest), records(), BUNDLE, None)).verdict is Verdict.ERRORED
    assert judge(JudgeInput(rule("sha256:" + "0" * 64), records(), BUNDLE, GIVEN)).verdict is Verdict.ERRORED
    unfit = suite(item("a", valid=('{"n":"1"}',)), repeats=200)
    judged = judge(JudgeInput(rule(unfit.digest), records(), BUNDLE, unfit))
    assert (judged.verdict, judged.findings[0].code) == (Verdict.ERRORED, "suite-unfit")
