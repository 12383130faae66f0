"""The compatibility gate passes a healthy engine and fails each kind of unhealthy one, naming the probe or case."""

import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import catalog, compatibility, malformed
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.leniency import LENIENCY
from schemas.policy import CompatibilityRule
from schemas.result import Severity, Verdict
from tests.support import served
from tests.support.faulty import faulty, hang

RULE = CompatibilityRule(gate="compatibility", boot_seconds="10", answer_seconds="5")
HASTY = CompatibilityRule(gate="compatibility", boot_seconds="10", answer_seconds="1")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    with served.served(tmp_path_factory.mktemp("good"), RULE) as context:
        yield context


@pytest.fixture(scope="module")
def passed(good):
    result, raw = catalog.run("compatibility", good)
    assert catalog.recompute(raw, None, None, good.bundle) == result
    return result, json.loads(raw)["records"]


def blocking(result):
    return {(one.code, one.pointer) for one in result.findings if one.severity is Severity.BLOCK}


def test_a_healthy_engine_passes(passed):
    result, records = passed
    assert result.verdict is Verdict.PASSED, result.summary
    assert {one.severity for one in result.findings} <= {Severity.INFO}
    assert len(records["cases"]) >= 60
    values = {one.name: one.value for one in result.measurements}
    assert values["context"] == 512
    assert values["malformed_refused"] >= 40


def test_each_declared_feature_was_probed(passed):
    _, records = passed
    assert records["probes"].keys() == {
        *("chat", "chat-one-token", "stop", "chat-stream", "chat-stream-usage", "stop-stream"),
        *("logprobs", "completion", "completion-stream"),
    }


def test_the_documented_server_errors_of_llama_cpp_are_noted(passed):
    result, _ = passed
    noted = {one.pointer for one in result.findings if one.code == "malformed-server-error-known"}
    assert noted == set(LENIENCY["llamacpp"].errors)


def test_progress_names_each_case(good):
    lines = []
    catalog.run("compatibility", dataclasses.replace(good, progress=lines.append))
    assert any("role-number" in line for line in lines)


# ------------------------------------------------------------------------------- real engines that are not right


def test_another_served_name_fails(tmp_path):
    with served.served(tmp_path / "case", RULE, alias="other") as context:
        result, _ = catalog.run("compatibility", context)
    assert result.verdict is Verdict.FAILED
    assert ("model-id", "start") in blocking(result)
    assert ("model", "chat") in blocking(result)


def test_less_context_than_promised_fails(tmp_path):
    with served.served(tmp_path / "case", RULE) as context:
        body = context.bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
        body["runtime"]["context_tokens"] = 4096
        promised = dataclasses.replace(context, bundle=type(context.bundle).model_validate(body))
        result, _ = catalog.run("compatibility", promised)
    assert blocking(result) == {("context-short", "start")}


@pytest.mark.parametrize("features", [["chat", "json_schema", "streaming", "tools"]])
def test_a_declared_feature_that_no_gate_proves_is_a_warning(tmp_path, features):
    with served.served(tmp_path / "case", RULE, serving={"features": features}) as context:
        result, _ = catalog.run("compatibility", context)
    assert result.verdict is Verdict.PASSED
    warned = [(one.code, one.pointer) for one in result.findings if one.severity is Severity.WARN]
    assert warned == [("feature-not-probed", "tools")]


def test_a_dead_engine_fails(tmp_path):
    with served.served(tmp_path / "case", HASTY) as context:
        pass
    result, _ = catalog.run("compatibility", context)
    assert result.verdict is Verdict.FAILED
    assert ("not-healthy", "start") in blocking(result)


def test_an_engine_that_lives_but_cannot_be_reached_is_errored(good):
    context = dataclasses.replace(good, endpoint=Endpoint("http://127.0.0.1:9", "chain", LLAMACPP))
    result, _ = catalog.run("compatibility", context)
    assert result.verdict is Verdict.ERRORED
    assert "cannot be reached" in result.summary


def test_without_an_engine_it_is_errored(good):
    result, _ = catalog.run("compatibility", dataclasses.replace(good, endpoint=None))
    assert result.verdict is Verdict.ERRORED


# -------------------------------------------------------------------------- faults put into a real engine's answers


def run_with(good, fault, rule=RULE, **changes):
    with faulty(good.endpoint.base_url, fault) as url:
        endpoint = Endpoint(url, good.endpoint.model, LLAMACPP)
        return catalog.run("compatibility", dataclasses.replace(good, endpoint=endpoint, rule=rule, **changes))[0]


def as_it_is(one):
    return one.status, one.content_type, one.body


def test_the_proxy_alone_changes_no_verdict(good):
    assert run_with(good, as_it_is).verdict is Verdict.PASSED


def test_b21_a_finish_reason_that_is_null_fails(good):
    def fault(one):
        return one.status, one.content_type, one.body.replace(b'"finish_reason":"stop"', b'"finish_reason":null')

    result = run_with(good, fault)
    assert result.verdict is Verdict.FAILED
    assert {("finish-reason", "chat"), ("finish-reason", "chat-stream")} <= blocking(result)


def test_b24_a_stream_that_loses_its_last_token_fails(good):
    def fault(one):
        body = one.body
        if one.content_type.startswith("text/event-stream"):
            body = body.replace(b'"content":"i"', b'"content":""').replace(b'"text":"i"', b'"text":""')
        return one.status, one.content_type, body

    result = run_with(good, fault)
    assert result.verdict is Verdict.FAILED
    assert {("stream-differs", "chat-stream"), ("stream-differs", "completion-stream")} <= blocking(result)


def test_b19_a_malformed_request_that_kills_the_engine_fails_and_is_named(tmp_path):
    with served.served(tmp_path / "case", HASTY) as context:
        dead = []

        def fault(one):
            if b'"role": 5' in one.request:
                dead.append(True)
                return None
            return None if dead else as_it_is(one)

        result = run_with(context, fault, HASTY, process_id=lambda: None if dead else context.process_id())
    assert result.verdict is Verdict.FAILED
    assert ("engine-died", "role-number") in blocking(result)
    assert "role-number" in " ".join(one.message for one in result.findings if one.code == "engine-died")


def test_an_engine_that_is_restarted_behind_the_gate_fails(good):
    restarted = []

    def fault(one):
        restarted.extend([True] if b'"max_tokens": [5]' in one.request else [])
        return as_it_is(one)

    result = run_with(good, fault, process_id=lambda: 2 if restarted else 1)
    names = [case.name for case in malformed.cases("chain", context_tokens=1, has_completions=True)]
    first_missing = min(names[names.index("max-tokens-list") + 1 :])
    assert result.verdict is Verdict.FAILED
    assert blocking(result) == {("engine-died", "max-tokens-list"), ("case-missing", first_missing)}


def test_b20_a_malformed_request_that_is_never_answered_fails(good):
    def fault(one):
        if b'"temperature": "hot"' in one.request:
            hang()
        return as_it_is(one)

    result = run_with(good, fault, HASTY)
    assert result.verdict is Verdict.FAILED
    assert blocking(result) == {("malformed-hang", "temperature-text")}


def test_a_malformed_request_that_spoils_later_answers_fails(good):
    spoiled = []

    def fault(one):
        spoiled.extend([True] if b'"n": 1000' in one.request else [])
        body = one.body.replace(b'"content":"Hi"', b'"content":"Ho"') if spoiled else one.body
        return one.status, one.content_type, body

    result = run_with(good, fault)
    assert result.verdict is Verdict.FAILED
    assert ("sentinel-differs", "n-huge") in blocking(result)
    assert ("sentinel-differs", "n-zero") not in blocking(result)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((500, "application/json", b'{"error":{"message":"boom"}}'), "malformed-server-error"),
        ((400, "text/html", b"<h1>no</h1>"), "malformed-silent"),
        ((400, "application/json", b'{"error":{"message":""}}'), "malformed-silent"),
        ((200, "application/json", b'{"choices":[]}'), "malformed-accepted"),
        (None, "malformed-no-answer"),
    ],
)
def test_an_answer_that_no_client_can_use_fails(good, answer, code):
    def fault(one):
        return answer if b'"seed": "x"' in one.request else as_it_is(one)

    assert blocking(run_with(good, fault)) == {(code, "seed-text")}


def test_a_server_error_in_other_words_than_those_known_fails(good):
    def fault(one):
        if b'"role": 5' in one.request:
            return 500, "application/json", b'{"error":{"message":"segmentation fault"}}'
        return as_it_is(one)

    assert blocking(run_with(good, fault)) == {("malformed-server-error", "role-number")}


# ------------------------------------------------------------------------------------------------ the judge alone


def conclude(good, records, **changes):
    return catalog.conclude("compatibility", dataclasses.replace(good, **changes), records, duration_ms=1)[0]


def replaced(records, probe, old, new):
    changed = copy.deepcopy(records)
    body = changed["probes"][probe]["body"]
    assert old in body
    changed["probes"][probe]["body"] = body.replace(old, new)
    return changed


@pytest.mark.parametrize(
    ("probe", "old", "new", "code"),
    [
        ("chat", '"object":"chat.completion"', '"object":"chat"', "object"),
        ("chat", '"id":"', '"xid":"', "id"),
        ("chat", '"created":', '"created":1', "created"),
        ("chat", '"index":0', '"index":1', "index"),
        ("chat", '"role":"assistant"', '"role":"user"', "role"),
        ("chat", '"content":"Hi"', '"content":null', "content"),
        ("chat", '"finish_reason":"stop"', '"finish_reason":"abort"', "finish-reason"),
        ("chat", '"finish_reason":"stop"', '"finish_reason":"length"', "finish-reason"),
        ("chat", '"completion_tokens":3', '"completion_tokens":4', "usage"),
        ("chat", '"completion_tokens":3', '"completion_tokens":"3"', "usage"),
        ("chat", '"usage"', '"use"', "usage"),
        ("chat", '"choices":[', '"choices":[],"x":[', "choices"),
        ("chat", "{", "", "not-json"),
        ("chat-one-token", '"completion_tokens":1', '"completion_tokens":2', "max-tokens"),
        ("chat-stream", "data: [DONE]\n\n", "", "stream-cut"),
        ("chat-stream", '"role":"assistant",', "", "role"),
        ("chat-stream", '"finish_reason":"stop"', '"finish_reason":null', "finish-reason"),
        ("chat-stream", '"content":"H"', '"content":"J"', "stream-differs"),
        (
            "chat-stream",
            '"delta":{"content":"H"}',
            '"delta":{"content":"H"},"finish_reason":"stop"',
            "text-after-finish",
        ),
        (
            "chat-stream",
            'data: {"choices":[{"finish_reason":"stop"',
            'data: {"choises":[{"finish_reason":"stop"',
            "event-malformed",
        ),
        ("chat-stream", "data: [DONE]\n\n", 'data: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n', "event-malformed"),
        ("chat-stream", "data: [DONE]\n\n", "data: [DONE]\n\ndata: {}\n\n", "event-malformed"),
        ("chat-stream-usage", '"choices":[],', '"choices":[{"index":0,"delta":{}}],', "usage"),
        ("chat-stream-usage", '"completion_tokens":3', '"completion_tokens":5', "usage"),
        ("stop", '"content":"H"', '"content":"Hi"', "stop-ignored"),
        ("stop-stream", '"delta":{}', '"delta":{"content":"Hi"}', "stop-ignored"),
        ("logprobs", '"logprobs"', '"no"', "logprobs"),
        ("logprobs", '"bytes":[72]', '"bytes":[73]', "logprobs"),
        ("completion", '"text_completion"', '"chat.completion"', "object"),
        ("completion", '"finish_reason":"stop"', '"finish_reason":null', "finish-reason"),
    ],
)
def test_each_break_of_the_wire_format_fails_and_names_the_probe(good, passed, *, probe, old, new, code):
    result = conclude(good, replaced(passed[1], probe, old, new))
    assert result.verdict is Verdict.FAILED
    assert (code, probe) in blocking(result)


def test_several_ids_in_one_stream_fail(good, passed):
    changed = copy.deepcopy(passed[1])
    stream = changed["probes"]["chat-stream"]
    stream["body"] = stream["body"].replace('"id":"', '"id":"other-', 1)
    assert blocking(conclude(good, changed)) == {("stream-ids", "chat-stream")}


def test_usage_that_was_not_asked_for_fails(good, passed):
    changed = copy.deepcopy(passed[1])
    changed["probes"]["chat-stream"] = changed["probes"]["chat-stream-usage"]
    assert blocking(conclude(good, changed)) == {("usage-unasked", "chat-stream")}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"status": 503}, "status"),
        ({"problem": "timeout"}, "no-answer"),
        ({"is_utf8": False}, "not-utf8"),
        ({"content_type": "text/plain"}, "content-type"),
    ],
)
@pytest.mark.parametrize("probe", ["chat", "chat-stream"])
def test_an_answer_that_is_none_fails(good, passed, values, code, probe):
    changed = copy.deepcopy(passed[1])
    changed["probes"][probe] |= values
    assert (code, probe) in blocking(conclude(good, changed))


@pytest.mark.parametrize(
    ("values", "verdict", "code"),
    [
        ({"health": 503}, Verdict.FAILED, "not-healthy"),
        ({"models": []}, Verdict.FAILED, "model-id"),
        ({"models": None}, Verdict.FAILED, "model-id"),
        ({"ready_ms": 10_001}, Verdict.FAILED, "boot-slow"),
        ({"ready_ms": None}, Verdict.ERRORED, "ready-unknown"),
        ({"context_tokens": 511}, Verdict.FAILED, "context-short"),
        ({"context_tokens": None}, Verdict.PASSED, "context-unproved"),
    ],
)
def test_each_fact_about_the_start_gets_its_verdict(good, passed, values, verdict, code):
    result = conclude(good, passed[1] | {"start": passed[1]["start"] | values})
    assert (result.verdict, result.findings[0].code) == (verdict, code)


def sentinel(outcome, state, seconds=0.01):
    return {"outcome": outcome, "detail": "x", "state": state, "seconds": seconds}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"process_id": None}, "engine-died"),
        ({"is_same_process": False}, "engine-died"),
        ({"health": 503}, "unhealthy-after"),
        ({"is_idle": False}, "request-survives"),
        ({"health": 0}, "health-late"),
        ({"sentinel": sentinel("ok", ["length", "Ho", "", 23, 2])}, "sentinel-differs"),
        ({"sentinel": sentinel("http_5xx", None)}, "sentinel-differs"),
        ({"sentinel": sentinel("timeout", None)}, "sentinel-late"),
    ],
)
def test_b27_what_a_case_leaves_behind_fails_and_names_the_case(good, passed, values, code):
    changed = copy.deepcopy(passed[1])
    changed["cases"][7] |= values
    assert blocking(conclude(good, changed)) == {(code, changed["cases"][7]["case"])}


@pytest.mark.parametrize(
    "values",
    [{"sentinel": sentinel("timeout", None, 5.0)}, {"is_idle": False}, {"health": 0}, {"exchange": "late"}],
)
def test_being_late_on_a_machine_that_was_slow_before_is_errored(good, passed, values):
    changed = copy.deepcopy(passed[1])
    changed["baseline"][0]["seconds"] = 1.3
    case = changed["cases"][7]
    case |= {"exchange": case["exchange"] | {"problem": "timeout"}} if "exchange" in values else values
    result = conclude(good, changed)
    assert result.verdict is Verdict.ERRORED
    assert result.findings[0].pointer == case["case"]


def test_a_wrong_answer_on_a_slow_machine_still_fails(good, passed):
    changed = copy.deepcopy(passed[1])
    changed["baseline"][0]["seconds"] = 1.3
    changed["cases"][7]["sentinel"] = sentinel("ok", ["length", "Ho", "", 23, 2])
    assert conclude(good, changed).verdict is Verdict.FAILED


def test_an_engine_that_never_answers_twice_alike_is_errored(good, passed):
    changed = copy.deepcopy(passed[1])
    changed["baseline"][1]["state"][1] = "Ho"
    result = conclude(good, changed)
    assert (result.verdict, result.findings[0].code) == (Verdict.ERRORED, "sentinel-unsteady")


def on_another_engine(bundle, name):
    body = bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["engine"]["name"] = name
    if name == "external":
        del body["engine"]["environment"]
    return type(bundle).model_validate(body)


def refusing(records, cases):
    """Return the records of an engine that answers 400 to these cases."""
    changed = copy.deepcopy(records)
    for record in changed["cases"]:
        if record["case"] in cases:
            record["exchange"] |= {"status": 400, "body": '{"error": {"message": "no"}}'}
    return changed


def told(result, severity):
    return {(one.code, one.pointer) for one in result.findings if one.severity is severity}


def test_an_engine_without_a_table_fails_for_server_errors_and_warns_of_what_it_accepts(good, passed):
    known = LENIENCY["llamacpp"]
    result = conclude(good, passed[1], bundle=on_another_engine(good.bundle, "external"))
    assert result.verdict is Verdict.FAILED
    assert blocking(result) == {("malformed-server-error", case) for case in known.errors}
    codes = {"malformed-accepted-unknown", "malformed-accepted-unlike"}
    warned = {pointer for code, pointer in told(result, Severity.WARN) if code in codes}
    assert warned
    assert warned <= known.accepts


def test_what_an_engine_without_a_table_accepts_is_a_person_s_to_judge(good, passed):
    """Neither a fault nor a pass without a word: a release waits until a manager has accepted the warning."""
    records = refusing(passed[1], LENIENCY["llamacpp"].errors)
    result = conclude(good, records, bundle=on_another_engine(good.bundle, "external"))
    assert result.verdict is Verdict.PASSED
    assert ("malformed-accepted-unknown", "role-unknown") in told(result, Severity.WARN)


@pytest.mark.parametrize(
    ("engine", "unknown", "unlike"),
    [
        ("sglang", "model-unknown", set()),
        ("trtllm", "temperature-negative", {"field-unknown", "json-nested-unknown-field"}),
        ("external", "role-unknown", {"field-unknown", "json-nested-unknown-field", "model-unknown"}),
    ],
)
def test_what_an_engine_s_documents_say_that_it_accepts_is_noted_and_what_they_say_it_refuses_is_not_let_pass(
    good, passed, engine, unknown, unlike
):
    """llama.cpp's answers, said to be another engine's: it accepts more than any of these."""
    records = refusing(passed[1], LENIENCY["llamacpp"].errors)
    result = conclude(good, records, bundle=on_another_engine(good.bundle, engine))
    assert result.verdict is Verdict.PASSED
    noted = {pointer for code, pointer in told(result, Severity.INFO) if code == "malformed-accepted-documented"}
    assert noted == LENIENCY[engine].accepts & LENIENCY["llamacpp"].accepts
    warned = told(result, Severity.WARN)
    assert ("malformed-accepted-unknown", unknown) in warned
    assert {pointer for code, pointer in warned if code == "malformed-accepted-unlike"} == unlike


def test_an_acceptance_without_an_answer_is_a_fault_of_any_engine(good, passed):
    records = refusing(passed[1], LENIENCY["llamacpp"].errors)
    next(one for one in records["cases"] if one["case"] == "field-unknown")["exchange"]["body"] = "{}"
    result = conclude(good, records, bundle=on_another_engine(good.bundle, "external"))
    assert blocking(result) == {("malformed-accepted", "field-unknown")}


@pytest.mark.parametrize(
    ("body", "is_said"),
    [
        ('{"error": {"message": "no"}}', True),
        ('{"error": "no"}', True),
        ('{"object": "error", "message": "no"}', True),
        ('{"detail": "Not Found"}', True),
        ('{"detail": [{"loc": ["body"], "msg": "Field required"}]}', True),
        ('{"error": {"message": ""}}', False),
        ('{"error": ""}', False),
        ('{"detail": []}', False),
        ("Not Found", False),
        ("", False),
    ],
)
def test_a_refusal_says_why_in_any_form_that_engines_use(body, is_said):
    case = malformed.Case("case", b"")
    exchange = {"problem": None, "status": 404, "body": body, "seconds": 0.1}
    found = malformed.judge_answer(case, exchange, engine="vllm", version="0.32.0", limit_seconds=5)
    assert [one.code for one in found] == ([] if is_said else ["malformed-silent"])


def test_another_version_of_the_engine_is_held_to_the_table_with_a_warning(good, passed):
    body = good.bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["engine"]["version"] = "2027.1"
    result = conclude(good, passed[1], bundle=type(good.bundle).model_validate(body))
    assert result.verdict is Verdict.PASSED
    assert Severity.WARN in {one.severity for one in result.findings}


def test_a_bundle_without_chat_is_errored(good, passed):
    body = good.bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["serving"]["features"] = ["completions"]
    assert conclude(good, passed[1], bundle=type(good.bundle).model_validate(body)).verdict is Verdict.ERRORED


@pytest.mark.parametrize("records", [{}, {"cases": [], "probes": {}}, {"start": {}}, {"start": None}])
def test_empty_records_are_errored(good, records):
    result = conclude(good, records)
    assert result.verdict is Verdict.ERRORED
    assert result.findings


def test_an_engine_that_did_not_become_ready_fails_with_its_log(good):
    records = compatibility.boot_failed("weights_unreadable", "it ended with status 1", ["tensor x is cut off"])
    result = conclude(good, records)
    assert result.verdict is Verdict.FAILED
    assert blocking(result) == {("boot-weights-unreadable", "start")}
    assert "tensor x is cut off" in result.findings[0].found
    for part in records["boot"]:
        kept = {name: value for name, value in records["boot"].items() if name != part}
        assert conclude(good, {"boot": kept}).verdict is Verdict.ERRORED


def test_an_engine_that_is_not_what_its_bundle_says_fails_with_each_difference(good):
    told = {"code": "context-differs", "severity": "block", "message": "Differs.", "found": "256", "expected": "512"}
    records = compatibility.boot_failed("identity_differs", "identity_differs: Differs.", [], [told])
    result = conclude(good, records)
    assert result.verdict is Verdict.FAILED
    assert [one.code for one in result.findings] == ["boot-identity-differs", "context-differs"]
    assert (result.findings[1].found, result.findings[1].expected) == ("256", "512")
    records["boot"]["findings"] = [{"code": "context-differs"}]
    assert conclude(good, records).verdict is Verdict.ERRORED


def test_no_cases_are_errored(good, passed):
    result = conclude(good, passed[1] | {"cases": []})
    assert (result.verdict, result.findings[0].code) == (Verdict.ERRORED, "case-missing")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_leaving_records_out_never_makes_a_pass(good, passed, data):
    changed = copy.deepcopy(passed[1])
    part = data.draw(st.sampled_from(["cases", "probes", "start", "baseline", "case", "exchange", "stops"]))
    if part == "cases":
        lost = data.draw(st.sets(st.sampled_from(range(len(changed["cases"]))), min_size=1))
        changed["cases"] = [one for place, one in enumerate(changed["cases"]) if place not in lost]
    elif part == "case":
        case = data.draw(st.sampled_from(changed["cases"]))
        case.pop(data.draw(st.sampled_from(["case", "exchange", "is_idle", "health", "sentinel", "process_id"])))
    elif part == "exchange":
        exchange = data.draw(st.sampled_from([one["exchange"] for one in changed["cases"]]))
        exchange.pop(data.draw(st.sampled_from(["problem", "status", "body", "seconds"])))
    elif part == "baseline":
        changed["baseline"].pop()
    else:
        changed[part].pop(data.draw(st.sampled_from(sorted(changed[part]))))
    assert conclude(good, changed).verdict is not Verdict.PASSED


def test_the_cases_have_distinct_names_and_every_exception_names_a_case():
    cases = malformed.cases("chain", context_tokens=512, has_completions=True)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert len(malformed.cases("chain", context_tokens=512, has_completions=False)) >= 40
    for known in LENIENCY.values():
        assert known.accepts | known.refuses | set(known.errors) <= set(names)
        assert not known.accepts & (known.refuses | set(known.errors))
        assert not (known.is_whole and known.refuses)
