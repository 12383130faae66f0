"""An adapter that the engine lists and does not serve is told from one that it does, by the answers under its name."""

import asyncio
import copy
import json

import pytest

from gates import adapters, compatibility
from gates.dialects.vllm import VLLM
from gates.endpoint import Endpoint
from gates.gate import JudgeInput
from schemas.policy import CompatibilityRule
from schemas.result import Severity, Verdict
from tests.support.chain_folder import describe_folder, write_chain_folder

BASE, ADAPTER = "chain", "tuned"
UNKNOWN = {"status": 404, "body": ""}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    made = describe_folder(write_chain_folder(tmp_path_factory.mktemp("m") / "m"), environment="sha256:" + "0" * 64)
    document = made.model_dump(mode="json", by_alias=True, exclude_none=True)
    paths = [f"adapters/{ADAPTER}/adapter_{name}" for name in ("config.json", "model.safetensors")]
    document["files"] += [
        {"path": path, "size": 1, "sha256": "sha256:" + "1" * 64, "role": "adapter"} for path in paths
    ]
    document["files"].sort(key=lambda file: file["path"])
    document["adapters"] = [{"name": ADAPTER, "files": paths, "rank": 8, "target_modules": ["q_proj"]}]
    document["serving"]["features"] = ["chat", "completions", "logprobs", "streaming"]
    return type(made).model_validate(document)


def exchange(model, text="one two", logprob=-0.5, rivals=(-0.5, -2.0, -3.0), **changes):
    entry = {"token": text, "bytes": list(text.encode()), "logprob": logprob}
    entry["top_logprobs"] = [{"token": "x", "bytes": [120], "logprob": one} for one in rivals]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": model,
        "choices": [choice | {"logprobs": {"content": [entry]} if logprob is not None else None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
    return {
        "problem": None,
        "status": 200,
        "content_type": "application/json",
        "seconds": 0.1,
        "sent_at": 1_790_000_000.0,
        "ended_at": 1_790_000_001.0,
        "body": json.dumps(body),
        "is_utf8": True,
    } | changes


def asked(*tuned, base=None):
    base = base or [exchange(BASE)] * len(adapters.QUESTIONS)
    return {BASE: base, ADAPTER: list(tuned) or [exchange(ADAPTER, logprob=-0.6)] * len(adapters.QUESTIONS)}


def judged(bundle, answers, unknown=UNKNOWN):
    return [(one.code, one.pointer, one.severity) for one in adapters.judge(bundle, answers, unknown)]


SAME = exchange(ADAPTER)
BLOCK, WARN = Severity.BLOCK, Severity.WARN


def test_an_adapter_that_answers_otherwise_raises_nothing(bundle):
    assert judged(bundle, asked()) == []
    assert judged(bundle, asked(SAME, SAME, exchange(ADAPTER, "three"))) == []
    # One value of one question is enough, also where it is a rival's; so is an answer of another length.
    assert judged(bundle, asked(SAME, SAME, exchange(ADAPTER, rivals=(-0.5, -2.0, -3.1)))) == []
    assert judged(bundle, asked(SAME, SAME, exchange(ADAPTER, rivals=(-0.5, -2.0)))) == []


@pytest.mark.parametrize("by", [0.0, 0.5 * adapters.LEAST_EFFECT_NAT])
def test_an_adapter_that_answers_as_the_base_does_has_no_effect(bundle, by):
    again = exchange(ADAPTER, logprob=-0.5 - by)
    assert judged(bundle, asked(again, again, again)) == [("adapter-no-effect", f"model {ADAPTER}", BLOCK)]


def test_without_values_equal_texts_prove_nothing(bundle):
    plain, base = exchange(ADAPTER, logprob=None), [exchange(BASE, logprob=None)] * 3
    unproved = [("adapter-effect-unproved", f"model {ADAPTER}", WARN)]
    assert judged(bundle, asked(plain, plain, plain, base=base)) == unproved
    assert judged(bundle, asked(SAME, SAME, plain)) == unproved
    assert judged(bundle, asked(plain, plain, exchange(ADAPTER, "three", None), base=base)) == []
    entry = {"content": [{"logprob": True, "top_logprobs": []}]}
    broken = json.loads(SAME["body"])
    broken["choices"][0]["logprobs"] = entry
    assert judged(bundle, asked(SAME, SAME, SAME | {"body": json.dumps(broken)})) == unproved


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -(10**400)])
def test_values_that_are_no_log_probabilities_prove_no_effect(bundle, value):
    broken = exchange(ADAPTER, rivals=(-0.5, value))
    same = [exchange(BASE, rivals=(-0.5, value))] * 3
    assert judged(bundle, asked(broken, broken, broken, base=same)) == [
        ("adapter-effect-unproved", f"model {ADAPTER}", WARN)
    ]


def test_reasoning_that_differs_is_an_effect(bundle):
    def reasoning(model, text):
        told = json.loads(exchange(model, logprob=None)["body"])
        told["choices"][0]["message"] = {"role": "assistant", "content": None, "reasoning_content": text}
        return exchange(model) | {"body": json.dumps(told)}

    base = [reasoning(BASE, "I think")] * 3
    assert judged(bundle, asked(*[reasoning(ADAPTER, "So")] * 3, base=base)) == []
    alike = judged(bundle, asked(*[reasoning(ADAPTER, "I think")] * 3, base=base))
    assert alike == [("adapter-effect-unproved", f"model {ADAPTER}", WARN)]


def test_an_adapter_of_the_base_s_name_blocks(bundle):
    again = bundle.model_copy(update={"adapters": [bundle.adapters[0].model_copy(update={"name": BASE})]})
    assert judged(again, {BASE: [exchange(BASE)] * 3}) == [("adapter-name-taken", f"model {BASE}", BLOCK)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (exchange(BASE), "model"),
        (exchange(ADAPTER, status=404, body='{"error": {"message": "no such model"}}'), "status"),
        (exchange(ADAPTER, problem="timeout"), "no-answer"),
        (exchange(ADAPTER, body="[]"), "not-json"),
    ],
)
def test_c089_a_name_that_is_not_served_blocks_whichever_question_shows_it(bundle, answer, code):
    assert judged(bundle, asked(SAME, answer, answer)) == [(code, f"model {ADAPTER}", BLOCK)]


def test_c089_a_name_that_nobody_has_must_be_refused_where_there_are_adapters(bundle):
    answered = {"status": 200, "body": "{}"}
    assert judged(bundle, asked(), answered) == [("model-name-unchecked", "model-unknown", BLOCK)]
    assert judged(bundle, asked(), None) == []
    alone = bundle.model_copy(update={"adapters": None})
    assert judged(alone, {}, answered) == []


def test_an_unsound_base_is_told_and_nothing_is_held_against_it(bundle):
    base = [exchange(BASE), exchange(BASE), exchange(BASE, problem="timeout")]
    assert judged(bundle, asked(SAME, SAME, SAME, base=base)) == [("no-answer", f"model {BASE}", BLOCK)]


def test_who_was_not_asked_all_questions_is_named(bundle):
    whole = asked()
    assert adapters.lacking(bundle, whole) == []
    assert adapters.lacking(bundle, {}) == [BASE, ADAPTER]
    assert adapters.lacking(bundle, {"other": [exchange("other", problem="timeout")]}) == [BASE, ADAPTER]
    assert adapters.lacking(bundle, whole | {ADAPTER: whole[ADAPTER][:-1]}) == [ADAPTER]
    assert adapters.lacking(bundle.model_copy(update={"adapters": None}), {}) == []


def test_each_name_is_asked_the_same_and_for_values_where_they_are_declared(bundle):
    bodies = []

    async def keep(_endpoint, path, body):
        bodies.append((path, json.loads(body)))
        return {}

    found = asyncio.run(adapters.ask(bundle, Endpoint("http://127.0.0.1:9", BASE, VLLM), keep))
    assert {name: len(answers) for name, answers in found.items()} == {BASE: 3, ADAPTER: 3}
    assert [body["model"] for _, body in bodies] == [BASE] * 3 + [ADAPTER] * 3
    for (_, base), (path, tuned) in zip(bodies[:3], bodies[3:], strict=True):
        salted = {"cache_salt": tuned["cache_salt"]}  # nothing is answered from what was asked before
        assert tuned == base | {"model": ADAPTER} | salted
        assert (path, tuned["temperature"], tuned["logprobs"], tuned["top_logprobs"]) == (VLLM.chat_path, 0, True, 3)

    async def hang(_endpoint, path, body):
        bodies.append((path, json.loads(body)))
        return exchange(BASE, problem="timeout" if len(bodies) == 5 else None) if len(bodies) != 4 else SAME

    bodies.clear()
    found = asyncio.run(adapters.ask(bundle, Endpoint("http://127.0.0.1:9", BASE, VLLM), hang))
    assert {name: len(answers) for name, answers in found.items()} == {BASE: 3, ADAPTER: 2}
    assert adapters.lacking(bundle, found) == []
    assert judged(bundle, found) == [("no-answer", f"model {ADAPTER}", BLOCK)]
    first = {BASE: [exchange(BASE, problem="timeout")]}
    assert (adapters.lacking(bundle, first), judged(bundle, first)) == ([], [("no-answer", f"model {BASE}", BLOCK)])
    quiet = bundle.model_copy(update={"serving": bundle.serving.model_copy(update={"features": ["chat"]})})
    bodies.clear()
    asyncio.run(adapters.ask(quiet, Endpoint("http://127.0.0.1:9", BASE, VLLM), keep))
    assert all("logprobs" not in body for _, body in bodies)
    assert asyncio.run(adapters.ask(bundle.model_copy(update={"adapters": None}), None, keep)) == {}


def test_the_gate_is_errored_where_an_adapter_was_not_asked_and_failed_where_it_has_no_effect(bundle):
    rule = CompatibilityRule(gate="compatibility", boot_seconds="10", answer_seconds="5")
    start = {"health": 200, "models": [BASE, ADAPTER], "context_tokens": 512, "ready_ms": 5}
    refused = exchange(BASE, status=400, body='{"error": {"message": "no"}}')
    sentinel = {"outcome": "ok", "detail": "", "seconds": 0.1, "state": ["stop", "a", None, 1, 1]}
    names = compatibility.malformed.cases(BASE, context_tokens=1, has_completions=False)
    plain = exchange(BASE)
    features = {"chat": plain, "chat-one-token": plain}
    records = {
        "start": start,
        "probes": features | {"stop": exchange(BASE, "o")},
        "stops": {"stop": "n", "stop-stream": None},
        "baseline": [sentinel, sentinel],
        "cases": [
            {
                "case": case.name,
                "exchange": plain if case.is_valid else refused,
                "is_idle": True,
                "health": 200,
                "sentinel": sentinel,
                "process_id": 1,
                "is_same_process": True,
            }
            for case in names
        ],
    }
    chatty = bundle.model_copy(update={"serving": bundle.serving.model_copy(update={"features": ["chat"]})})

    def judge(**more):
        given = JudgeInput(rule=rule, bundle=chatty, suite=None, reference=None, records=copy.deepcopy(records | more))
        return compatibility.judge(given)

    assert judge(adapters=asked()).verdict is Verdict.PASSED, judge(adapters=asked())
    silent, mute = judge(), judge(adapters=asked(SAME, SAME, SAME))
    assert (silent.verdict, silent.findings[0].code) == (Verdict.ERRORED, "adapter-not-asked")
    assert (mute.verdict, mute.findings[0].code) == (Verdict.FAILED, "adapter-no-effect")
