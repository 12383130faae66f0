"""The golden gate tells a good bundle from altered ones on the real engine, and names prompt, place and tokens."""

import dataclasses
import json
import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import catalog, golden
from gates.dialects import releases
from gates.dialects.base import Capability
from gates.dialects.llamacpp import LLAMACPP
from gates.dialects.table import DIALECTS
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.gate import EARLIER
from gates.golden import _told
from gates.questions import untold
from schemas.policy import GoldenRule
from schemas.reference import Reference
from schemas.result import Severity, Verdict
from tests.support import chain, served
from tests.support.chain import token

SUITE = served.suite("ping", "hello", "")
RULE = GoldenRule(gate="golden", suite=SUITE.digest, margin_nat=Decimal("0.05"), min_prompts=3)
# Each logit is sqrt(320) = 17.9 times the head's value: "J" follows the newline 0.036 nat behind "H".
NEAR_TIE = {(token("\n"), token("J")): chain.GAIN - 0.002}
OTHER_SIDE = {(token("\n"), token("J")): chain.GAIN + 0.0001}


def record(context, suite=SUITE, **changes):
    reference = golden.record(context.endpoint, suite, context.bundle, engine=context.engine, hardware="cpu-x86")
    return reference.model_copy(update=changes)


def run(context, reference, suite=SUITE, rule=RULE):
    result, raw = catalog.run("golden", served.with_suite(context, suite, reference=reference, rule=rule))
    assert catalog.recompute(raw, suite, reference, context.bundle) == result
    return result


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    with served.served(tmp_path_factory.mktemp("good"), RULE) as context:
        yield context


@pytest.fixture(scope="module")
def reference(good):
    return record(good)


@pytest.fixture(scope="module")
def undecided(tmp_path_factory):
    with served.served(tmp_path_factory.mktemp("tie"), RULE, runners_up=NEAR_TIE) as context:
        yield record(context)


def test_a_reference_holds_the_tokens_that_the_engine_read_and_wrote(good, reference):
    first = reference.recordings[0]
    assert len(first.prompt_ids) == chain.PROMPT_TOKENS
    assert [one.id for one in first.output] == chain.ANSWER_IDS
    assert first.finish_reason == "stop"
    assert reference.noise.repeats == 2
    assert reference.noise.diverging_prompts == 0
    assert reference.engine == "llamacpp 2026.10.11549"
    assert Reference.parse(reference.canonical()) == reference


def test_the_same_bundle_passes_and_says_that_it_is_its_own_reference(good, reference):
    result = run(good, reference)
    assert result.verdict is Verdict.PASSED
    assert [(one.code, one.severity) for one in result.findings] == [("self-reference", Severity.INFO)]
    shares = {one.name: (one.k, one.n) for one in result.measurements if one.k is not None}
    assert shares == {"prompts_equal": (3, 3), "outputs_equal": (3, 3)}


def test_another_bundle_with_equal_answers_passes(tmp_path, reference):
    with served.served(tmp_path / "case", RULE, extra={token("Z"): token("Y")}) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.PASSED
    assert result.findings == []


def test_an_altered_template_fails_and_names_the_first_differing_token(tmp_path, reference):
    template = chain.TEMPLATE.replace("<|im_start|>{{ m", "<|im_start|> {{ m")
    with served.served(tmp_path / "case", RULE, template=template) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    first = result.findings[0]
    assert (first.code, first.pointer) == ("prompt-tokens-differ", "p0/1")
    assert (first.found, first.expected) == ("token 37 ' '", "token 122 'u'")
    assert first.found in result.summary
    assert first.expected in result.summary


def test_a_second_beginning_of_text_is_named_as_what_it_is(tmp_path):
    with served.served(tmp_path / "once", RULE, add_bos=True) as context:
        reference = record(context)
        assert reference.recordings[0].prompt_ids[:2] == [1, 3]
    with served.served(tmp_path / "twice", RULE, add_bos=True, template="<s><s>" + chain.TEMPLATE) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    assert {one.code for one in result.findings} == {"double-bos"}
    assert "'<s>'" in result.summary


def test_a_prompt_that_the_template_refuses_fails(tmp_path, reference):
    template = "{% if messages[0]['content'] == 'hello' %}{{ raise_exception('no') }}{% endif %}" + chain.TEMPLATE
    with served.served(tmp_path / "case", RULE, template=template) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    assert [(one.code, one.pointer) for one in result.findings] == [("request-failed", "p1")]


@pytest.mark.parametrize(
    ("variant", "place", "found"),
    [
        ({"extra": {token("H"): token("o")}}, "p0/1", "token 116 'o'"),
        ({"headless": True}, "p0/0", "token 15 '\\n'"),
    ],
    ids=["a row of the head", "no head [C17]"],
)
def test_altered_weights_fail_and_name_the_first_differing_output_token(tmp_path, reference, variant, place, found):
    with served.served(tmp_path / "case", RULE, **variant) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    first = result.findings[0]
    assert (first.code, first.pointer) == ("output-differs", place)
    assert first.found.startswith(found)


def test_weights_that_are_not_numbers_fail(tmp_path, reference):
    with served.served(tmp_path / "case", RULE, runners_up={(token("H"), token("Q")): math.nan}) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    assert (result.findings[0].code, result.findings[0].pointer) == ("request-failed", "p0")


def test_a_changed_sampling_default_fails(tmp_path):
    # Alone, "q" and "w" follow each other; a repetition penalty lets the second best, "z", through [C48].
    loop = {token("\n"): token("q"), token("q"): token("w"), token("w"): token("q"), token("z"): 4}
    second = {(token(before), token("z")): 9.8 for before in "\nqwz"}
    with served.served(tmp_path / "plain", RULE, extra=loop, runners_up=second) as context:
        reference = record(context)
        assert "".join(one.text for one in reference.recordings[0].output) == "qwqwqwqw"
    penalty = {"general.sampling.penalty_repeat": 1.05}
    with served.served(tmp_path / "case", RULE, extra=loop, runners_up=second, metadata=penalty) as context:
        result = run(context, reference)
    assert result.verdict is Verdict.FAILED
    assert result.findings[0].code == "output-differs"


def test_a_flip_where_the_reference_was_undecided_passes_and_is_noted(tmp_path, undecided):
    with served.served(tmp_path / "case", RULE, extra={token("\n"): token("J")}, runners_up=flipped()) as context:
        result = run(context, undecided)
    assert result.verdict is Verdict.PASSED, result
    assert {(one.code, one.severity) for one in result.findings} == {("output-noise", Severity.INFO)}
    margin = next(one for one in result.measurements if one.name == "divergence_margin")
    assert (margin.value, margin.n) == (pytest.approx(0.0358, abs=0.0005), 3)
    assert result.summary == (
        "All 3 prompts are read as the same tokens, and 0 answers are the same token by token; "
        "3 part where the reference was undecided to within 0.05 nat."
    )


@pytest.mark.parametrize(
    ("compared", "same", "said"),
    [
        (3, 3, "All 3 prompts are read as the same tokens and answered with the same ones."),
        (1, 1, "The one prompt is read as the same tokens and answered with the same ones."),
        (2, 1, "All 2 prompts are read as the same tokens, and 1 answer is the same token by token; 1 parts where"),
        (1, 0, "The one prompt is read as the same tokens, and 0 answers are the same token by token; 1 parts where"),
    ],
)
def test_a_pass_counts_what_is_accepted_and_nothing_that_is_not_there(compared, same, said):
    assert _told(compared, same, RULE).startswith(said)


def test_a_pass_of_an_earlier_version_is_recomputed_in_its_words(good, reference):
    result, raw = catalog.run("golden", served.with_suite(good, SUITE, reference=reference))
    assert result.summary == "All 3 prompts are read as the same tokens and answered with the same ones."
    (older,) = {
        catalog.recompute(raw, SUITE, reference, good.bundle, manner).summary
        for manner in EARLIER
        if manner.counts_none
    }
    assert older == (
        "All 3 prompts are read as the same tokens, and 3 answers are the same token by token; "
        "0 part where the reference was undecided to within 0.05 nat."
    )


def flipped():
    return {(token("\n"), token("H")): chain.GAIN - 0.001, (token("J"), token("i")): 1.0}


def test_the_same_flip_fails_under_a_narrower_margin(tmp_path, undecided):
    rule = RULE.model_copy(update={"margin_nat": Decimal("0.01")})
    with served.served(tmp_path / "case", RULE, extra={token("\n"): token("J")}, runners_up=flipped()) as context:
        result = run(context, undecided, rule=rule)
    assert result.verdict is Verdict.FAILED
    assert "0.01 are accepted" in result.summary


def test_an_engine_that_is_gone_is_errored_not_failed(tmp_path, reference):
    with served.served(tmp_path / "case", RULE) as context:
        pass
    result = run(context, reference)
    assert result.verdict is Verdict.ERRORED
    assert result.findings[0].code == "request-not-made"


def test_nothing_is_recorded_from_an_engine_that_is_gone(tmp_path):
    with served.served(tmp_path / "case", RULE) as context:
        pass
    with pytest.raises(InstrumentError, match="p0"):
        record(context)


# ------------------------------------------------------------------------------------------ the judge alone


@pytest.fixture(scope="module")
def records(good, reference):
    _, raw = catalog.run("golden", served.with_suite(good, SUITE, reference=reference))
    return json.loads(raw)["records"]


def conclude(context, records, reference, suite=SUITE, rule=RULE):
    changed = served.with_suite(context, suite, reference=reference, rule=rule)
    return catalog.conclude("golden", changed, records, duration_ms=1)[0]


def noisy(reference, **changes):
    return reference.model_copy(update={"noise": reference.noise.model_copy(update=changes)})


def test_a_noisy_reference_is_errored_whatever_the_answers_are(good, reference, records):
    result = conclude(good, records, noisy(reference, max_margin_nat=Decimal("0.06")))
    assert result.verdict is Verdict.ERRORED
    assert result.findings[0].code == "reference-not-reproducible"


def test_a_reference_that_was_recorded_once_is_errored(good, reference, records):
    assert conclude(good, records, noisy(reference, repeats=1)).verdict is Verdict.ERRORED


def test_no_reference_is_errored(good, records):
    result = conclude(good, records, None)
    assert (result.verdict, result.findings[0].code) == (Verdict.ERRORED, "no-reference")


def test_no_suite_is_errored(good, reference, records):
    assert conclude(good, records, reference, suite=None).verdict is Verdict.ERRORED


def test_a_reference_of_another_suite_is_errored(good, reference, records):
    other = reference.model_copy(update={"suite": "sha256:" + "1" * 64})
    result = conclude(good, records, other)
    assert (result.verdict, result.findings[0].code) == (Verdict.ERRORED, "reference-of-another-suite")


def test_a_reference_that_lacks_a_prompt_is_errored(good, reference, records):
    other = reference.model_copy(update={"recordings": reference.recordings[:2]})
    assert conclude(good, records, other).verdict is Verdict.ERRORED


def test_fewer_prompts_than_the_policy_asks_for_are_inconclusive(good, reference, records):
    rule = RULE.model_copy(update={"min_prompts": 4})
    result = conclude(good, records, reference, rule=rule)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "3 prompts were compared, and the policy asks for 4" in result.summary


@pytest.mark.parametrize("lacks", [Capability.RENDER, Capability.TOKEN_IDS, Capability.LOGPROBS])
def test_an_engine_that_does_not_tell_what_is_compared_is_neither_passed_nor_failed(good, reference, lacks):
    dialect = dataclasses.replace(LLAMACPP, capabilities=LLAMACPP.capabilities - {lacks})
    silent = dataclasses.replace(good, endpoint=Endpoint(good.endpoint.base_url, "chain", dialect))
    for known in (reference, None):
        result = run(silent, known)
        assert (result.verdict, [one.code for one in result.findings]) == (Verdict.INCONCLUSIVE, ["tokens-untold"])
    assert "llamacpp does not tell" in result.summary
    assert "Take the gate `golden` out" in result.findings[0].advice
    with pytest.raises(InstrumentError, match="Nothing can be recorded: llamacpp does not tell"):
        golden.require_told(dialect)


RELEASES = {"sglang": "0.5.9", "trtllm": "1.3.0", "tgi": "3.3.6", "transformers": "5.19.0", "vllm": "0.32.0"}


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_only_engines_that_tell_their_tokens_are_compared(name):
    told = untold(releases.in_version(DIALECTS[name], RELEASES.get(name, "1")))
    assert (told is None) == (name in {"llamacpp", "vllm"}), told


def change(records, place=0, **values):
    prompts = [one | values if index == place else one for index, one in enumerate(records["prompts"])]
    return {"prompts": prompts}


@pytest.mark.parametrize(
    ("values", "verdict", "code"),
    [
        ({"problem": {"of": "engine", "outcome": "http_5xx", "detail": "x"}}, Verdict.FAILED, "request-failed"),
        ({"problem": {"of": "instrument", "outcome": "timeout", "detail": "x"}}, Verdict.ERRORED, "request-not-made"),
        ({"output": [], "completion_tokens": 0}, Verdict.FAILED, "answer-empty"),
        ({"output": []}, Verdict.ERRORED, "output-tokens-unproved"),
        ({"prompt_tokens": 24}, Verdict.ERRORED, "prompt-tokens-unproved"),
        ({"prompt_ids": []}, Verdict.FAILED, "prompt-tokens-differ"),
        ({"finish_reason": "length"}, Verdict.FAILED, "finish-differs"),
        ({"completion_tokens": 2}, Verdict.ERRORED, "output-tokens-unproved"),
    ],
)
def test_each_kind_of_answer_gets_its_verdict(good, reference, records, *, values, verdict, code):
    result = conclude(good, change(records, **values), reference)
    assert (result.verdict, result.findings[0].code, result.findings[0].pointer[:2]) == (verdict, code, "p0")


def test_a_failure_stands_beside_an_instrument_error(good, reference, records):
    broken = change(records, 0, problem={"of": "instrument", "outcome": "timeout", "detail": "x"})
    broken = change(broken, 1, finish_reason="length")
    assert conclude(good, broken, reference).verdict is Verdict.FAILED


def test_an_answer_that_goes_on_without_a_token_for_its_end_fails(good, reference, records):
    shorter = records["prompts"][0]["output"][:2]
    result = conclude(good, change(records, output=shorter, completion_tokens=2), reference)
    assert result.verdict is Verdict.FAILED
    assert "the end of the answer" in result.summary


def test_a_token_far_behind_a_near_tie_is_no_noise(good, reference, records):
    # The reference's best two are close, and the candidate took a third, far behind: the tie excuses nothing.
    body = json.loads(reference.canonical())
    body["recordings"][0]["output"][0]["top"] = [
        {"id": 77, "text": "H", "logprob": "-0.7"},
        {"id": 79, "text": "J", "logprob": "-0.71"},
        {"id": 80, "text": "K", "logprob": "-5"},
    ]
    body["recordings"][0]["output"][0]["logprob"] = "-0.7"
    close = Reference.model_validate(body)
    top = [{"id": 80, "text": "K", "logprob": -0.1}, {"id": 77, "text": "H", "logprob": -3.0}]
    taken = {"id": 80, "text": "K", "logprob": -0.1, "top": top}
    output = [taken, *records["prompts"][0]["output"][1:]]
    result = conclude(good, change(records, output=output), close)
    assert result.verdict is Verdict.FAILED
    assert "4.3 nat" in result.summary


@pytest.mark.parametrize(
    "broken", [{}, {"prompts": []}, {"prompts": None}, {"prompts": [{}]}, {"prompts": {}}, {"prompts": [None]}]
)
def test_empty_records_are_errored(good, reference, broken):
    result = conclude(good, broken, reference)
    assert result.verdict is Verdict.ERRORED
    assert result.findings


def test_a_prompt_that_is_recorded_twice_is_errored(good, reference, records):
    doubled = {"prompts": records["prompts"] + records["prompts"][:1]}
    assert conclude(good, doubled, reference).verdict is Verdict.ERRORED


HARMS = [
    {"prompt_ids": [1]},
    {"finish_reason": "length"},
    {"problem": {"of": "engine", "outcome": "http_5xx", "detail": "x"}},
    {"problem": {"of": "instrument", "outcome": "timeout", "detail": "x"}},
    {"output": [], "completion_tokens": 0},
    {},
]


@settings(max_examples=200)
@given(data=st.data())
def test_leaving_records_out_never_makes_a_pass(good, reference, records, data):
    harmed = records
    for place in range(3):
        harmed = change(harmed, place, **data.draw(st.sampled_from(HARMS)))
    kept = data.draw(st.lists(st.sampled_from(range(3)), unique=True, max_size=2))
    thinned = [harmed["prompts"][place] for place in sorted(kept)]
    if thinned and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(thinned[0])))
        thinned[0] = {name: value for name, value in thinned[0].items() if name != key}
    assert conclude(good, {"prompts": thinned}, reference).verdict is not Verdict.PASSED


@given(data=st.data())
def test_leaving_a_value_out_never_makes_a_pass_of_a_failure(good, reference, records, data):
    harmed = change(records, 0, **data.draw(st.sampled_from(HARMS[:-1])))
    key = data.draw(st.sampled_from(sorted(harmed["prompts"][0])))
    harmed["prompts"][0].pop(key)
    assert conclude(good, harmed, reference).verdict is not Verdict.PASSED
