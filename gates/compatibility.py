"""The compatibility gate: the engine that booted is the one promised, speaks the wire format, and survives misuse.

Nothing here is about what the model says. A healthy `/health` proves nothing, an answer of 200 does not prove that
a field was understood, and a malformed request may cost its sender an error but never anybody else an answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gates import adapters, malformed, wire
from gates.gate import MAX_FINDINGS, Gate, Judged, JudgeInput, Records, clip, errored, finding
from gates.probes import LOGPROBS_TOP, MAX_TOKENS, measure
from schemas.bundle import Bundle, Feature
from schemas.policy import CompatibilityRule
from schemas.result import Finding, Measurement, Severity, Verdict

PROBED = frozenset({Feature.CHAT, Feature.COMPLETIONS, Feature.STREAMING, Feature.LOGPROBS, Feature.SYSTEM_ROLE})
"""Declared features that this version of the gate proves."""

SLOW_RATIO = 0.25
"""When an ordinary request took more than this share of the time limit, being late proves nothing."""
_LATE = frozenset({"malformed-hang", "request-survives", "health-late", "sentinel-late"})


_BOOT_ADVICE = {
    "weights_unreadable": "Check that the weights are whole, and of an architecture that this engine version reads.",
    "template_unreadable": "Render the chat template by hand; the engine's log names the place.",
    "bad_argument": "Correct engine.arguments; the engine's log names the argument.",
    "unsupported": "Change what the engine's driver refuses.",
    "timeout": "Let it load faster, or allow more time in the policy's boot_seconds.",
    "identity_differs": "Compare the two values of each finding, and correct the bundle or what starts the engine.",
    "wrong_model": "Set the engine's served name (alias) to serving.served_name.",
}


@dataclass(slots=True)
class _Tally:
    findings: list[Finding] = field(default_factory=list)
    doubtful: list[Finding] = field(default_factory=list)


def judge(given: JudgeInput) -> Judged:
    """Judge start-up, wire format, declared features and malformed requests.

    Failed on any finding that blocks. Errored when a probe or a case has no record, when the time to ready is not
    known, or when the engine's answer alone changes from one request to the next, so that no sentinel can be told
    from damage.
    """
    rule, bundle, records = given.rule, given.bundle, given.records
    if not isinstance(rule, CompatibilityRule):
        return errored("The rule is none of this gate.")
    if "boot" in records:
        return _judge_failed_boot(records["boot"])
    if Feature.CHAT not in bundle.serving.features:
        message = "The bundle does not declare chat, through which this gate asks; it cannot be judged."
        return errored(message, [finding("chat-not-declared", message, expected="chat")])
    tally = _Tally()
    _judge_start(rule, bundle, records["start"], tally)
    tally.findings += _judge_wire(bundle, records)
    tally.findings += _judge_features(bundle)
    _judge_malformed(rule, bundle, records, tally)
    _judge_adapters(bundle, records, tally)
    measurements = _measurements(rule, bundle, records)
    blocking = [one for one in tally.findings if one.severity is Severity.BLOCK]
    others = [one for one in tally.findings if one.severity is not Severity.BLOCK]
    findings = given.manner.bound(blocking + tally.doubtful + others)
    if blocking:
        more = f" ({len(blocking)} findings block.)" if len(blocking) > 1 else ""
        return Judged(Verdict.FAILED, clip(blocking[0].message + more), measurements, findings)
    if tally.doubtful:
        return errored(tally.doubtful[0].message, findings, measurements)
    summary = (
        f"Ready after {records['start']['ready_ms']} ms; {len(records['probes'])} probes keep the wire format, and the "
        f"engine answered the same after each of {len(records['cases'])} malformed requests."
    )
    return Judged(Verdict.PASSED, summary, measurements, findings)


def boot_failed(cause: str, detail: str, log_tail: Sequence[str], findings: Sequence[Records] = ()) -> Records:
    """Return the records of a candidate whose engine did not become ready: it fails, with cause and log.

    Args:
        cause: short name, such as weights_unreadable.
        detail: what happened, in one sentence.
        log_tail: the engine's last lines.
        findings: where it differs from its bundle, when that is why.
    """
    more = {"findings": list(findings)} if findings else {}
    return {"boot": {"cause": cause, "detail": detail, "log_tail": list(log_tail), **more}}


def _judge_failed_boot(boot: Records) -> Judged:
    message = f"The engine did not become ready: {str(boot['detail']).rstrip('.')}."
    log = "\n".join(str(line) for line in boot["log_tail"])
    advice = _BOOT_ADVICE.get(boot["cause"], "Boot the bundle on a like machine with the same arguments.")
    code = "boot-" + str(boot["cause"]).replace("_", "-")
    found = [finding(code, message, pointer="start", found=log or None, advice=advice)]
    found += [Finding.model_validate(one) for one in boot.get("findings", ())]
    return Judged(Verdict.FAILED, clip(message), (), found[:MAX_FINDINGS])


def _judge_start(rule: CompatibilityRule, bundle: Bundle, start: Records, tally: _Tally) -> None:
    served, wanted = start["context_tokens"], bundle.runtime.context_tokens
    if start["health"] != 200:
        message = f"/health answers {start['health']}."
        tally.findings.append(finding("not-healthy", message, pointer="start", found=start["health"], expected=200))
    if bundle.serving.served_name not in (start["models"] or []):
        message = f"The engine serves {start['models']}, and the bundle promises {bundle.serving.served_name}."
        advice = "Set the engine's served name (alias) to serving.served_name."
        tally.findings.append(
            finding(
                "model-id",
                message,
                pointer="start",
                found=start["models"],
                expected=bundle.serving.served_name,
                advice=advice,
            )
        )
    if start["ready_ms"] is None:
        message = "How long the engine took to become ready is not known; boot it again under the runner."
        tally.doubtful.append(finding("ready-unknown", message, pointer="start"))
    elif start["ready_ms"] > rule.boot_seconds * 1000:
        message = f"The engine was ready after {start['ready_ms']} ms; the policy allows {rule.boot_seconds} s."
        tally.findings.append(finding("boot-slow", message, pointer="start", found=start["ready_ms"]))
    if not served:
        message = "The engine does not say how much context a request gets."
        tally.findings.append(finding("context-unproved", message, severity=Severity.WARN, pointer="start"))
    elif served < wanted:
        message = f"A request gets {served} tokens of context; the bundle promises {wanted}."
        advice = "Raise the engine's context (per sequence), or promise less."
        tally.findings.append(
            finding("context-short", message, pointer="start", found=served, expected=wanted, advice=advice)
        )


def _judge_wire(bundle: Bundle, records: Records) -> Iterator[Finding]:
    model, features, probes = bundle.serving.served_name, bundle.serving.features, records["probes"]
    chat = probes["chat"]
    found = wire.plain("chat", chat, model=model, max_tokens=MAX_TOKENS, is_chat=True)
    yield from found
    yield from wire.plain("chat-one-token", probes["chat-one-token"], model=model, max_tokens=1, is_chat=True)
    if not found:
        yield from _judge_stop(records, chat)
    if Feature.STREAMING in features:
        yield from _judge_streams(model, records, chat, is_whole=not found)
    if Feature.COMPLETIONS in features:
        plain = probes["completion"]
        bad = wire.plain("completion", plain, model=model, max_tokens=MAX_TOKENS, is_chat=False)
        yield from bad
        if Feature.STREAMING in features:
            stream = probes["completion-stream"]
            bad += wire.streamed(
                "completion-stream", stream, model=model, max_tokens=MAX_TOKENS, is_chat=False, wants_usage=False
            )
            yield from bad or wire.same_text("completion-stream", plain, stream, is_chat=False)
    if Feature.LOGPROBS in features:
        yield from wire.logprobs("logprobs", probes["logprobs"], top=LOGPROBS_TOP)
    if Feature.SYSTEM_ROLE in features:
        yield from wire.plain("system-role", probes["system-role"], model=model, max_tokens=MAX_TOKENS, is_chat=True)


def _judge_stop(records: Records, chat: Records) -> Iterator[Finding]:
    text = wire.text_of(chat["body"], is_chat=True) or ""
    if len(text) < 2:
        message = "The probe's answer is too short to try a stop string on."
        yield finding("stop-not-probed", message, severity=Severity.WARN, pointer="stop", found=repr(text))
        return
    exchange = records["probes"]["stop"]
    stopped = wire.text_of(exchange["body"], is_chat=True)
    yield from wire.answered("stop", exchange) or wire.stopped(
        "stop", stopped, whole=text, stop=records["stops"]["stop"]
    )


def _judge_streams(model: str, records: Records, chat: Records, *, is_whole: bool) -> Iterator[Finding]:
    probes = records["probes"]
    for name, wants_usage in (("chat-stream", False), ("chat-stream-usage", True)):
        stream = probes[name]
        found = wire.streamed(name, stream, model=model, max_tokens=MAX_TOKENS, is_chat=True, wants_usage=wants_usage)
        yield from found
        if is_whole and not found:
            yield from wire.same_text(name, chat, stream, is_chat=True)
    if is_whole and (stop := records["stops"]["stop-stream"]) is not None:
        exchange = probes["stop-stream"]
        whole = wire.text_of(chat["body"], is_chat=True) or ""
        text = wire.read_stream(exchange["body"], is_chat=True).text
        yield from wire.answered("stop-stream", exchange) or wire.stopped("stop-stream", text, whole=whole, stop=stop)


def _judge_features(bundle: Bundle) -> Iterator[Finding]:
    for feature in bundle.serving.features:
        if feature is Feature.JSON_SCHEMA:
            # No warning: a policy that relies on it has the gate that proves it.
            message = "The bundle declares json_schema, which the gate `structured` proves and this one does not."
            yield finding("feature-not-probed", message, severity=Severity.INFO, pointer=feature.value)
        elif feature not in PROBED:
            message = f"The bundle declares {feature}, which this gate does not prove yet."
            advice = "Leave it out of serving.features, or accept it knowingly."
            yield finding("feature-not-probed", message, severity=Severity.WARN, pointer=feature.value, advice=advice)


def _judge_adapters(bundle: Bundle, records: Records, tally: _Tally) -> None:
    asked = records.get("adapters", {})
    if lacking := adapters.lacking(bundle, asked):
        message = f"{lacking[0]} was not asked all questions that adapters are; run the gate again."
        tally.doubtful.append(finding("adapter-not-asked", message, pointer="adapters", found=", ".join(lacking)))
        return
    unknown = next((one["exchange"] for one in records["cases"] if one["case"] == "model-unknown"), None)
    tally.findings += adapters.judge(bundle, asked, unknown)


def _judge_malformed(rule: CompatibilityRule, bundle: Bundle, records: Records, tally: _Tally) -> None:
    baseline, engine = records["baseline"], bundle.engine
    states = [sentinel["state"] for sentinel in baseline]
    if len(states) != 2 or states[0] is None or states[0] != states[1]:
        message = "The same request got two different answers before any malformed one; sentinels prove nothing here."
        tally.doubtful.append(
            finding("sentinel-unsteady", message, pointer="sentinel", found=states[-1:], expected=states[:1])
        )
    cases = {
        case.name: case
        for case in malformed.cases(
            bundle.serving.served_name, context_tokens=1, has_completions=Feature.COMPLETIONS in bundle.serving.features
        )
    }
    if missing := sorted(cases.keys() - {record["case"] for record in records["cases"]}):
        message = f"{len(missing)} malformed requests were not sent, such as {missing[0]}; run the gate again."
        tally.doubtful.append(finding("case-missing", message, pointer=missing[0], found=", ".join(missing)))
    limit = float(rule.answer_seconds)
    slowest = max(sentinel["seconds"] for sentinel in baseline)
    for record in records["cases"]:
        case = cases[record["case"]]
        found = malformed.judge_answer(
            case, record["exchange"], engine=engine.name, version=engine.version, limit_seconds=limit
        )
        found += _judge_aftermath(case.name, record, states[0], limit, bundle)
        if slowest > limit * SLOW_RATIO:
            # The machine was too slow for this limit already, so that lateness is not the engine's alone.
            late = [one for one in found if one.code in _LATE and one.severity is Severity.BLOCK]
            tally.doubtful += late
            found = [one for one in found if one not in late]
        tally.findings += found
        slowest = max(slowest, record["sentinel"]["seconds"])


def _judge_aftermath(
    name: str, record: Records, expected: object, limit_seconds: float, bundle: Bundle
) -> Iterator[Finding]:
    advice = "One client can take this engine from all others: do not release it, or filter the request before it."
    if record["process_id"] is None or not record["is_same_process"]:
        message = f"The engine died of the malformed request {name}."
        yield finding("engine-died", message, pointer=name, advice=advice)
        return
    if record["is_idle"] is False and bundle.serving.cancellation == "on_disconnect":
        message = f"{limit_seconds:g} s after the malformed request {name} the engine still works on it."
        yield finding("request-survives", message, pointer=name, advice=advice)
    if record["health"] != 200:
        code = "health-late" if record["health"] == 0 else "unhealthy-after"
        message = f"/health answers {record['health']} after the malformed request {name}."
        yield finding(code, message, pointer=name, found=record["health"], expected=200, advice=advice)
    sentinel = record["sentinel"]
    if sentinel["outcome"] == "timeout":
        message = f"After the malformed request {name} an ordinary request got no answer within {limit_seconds:g} s."
        yield finding("sentinel-late", message, pointer=name, expected=expected, advice=advice)
    elif sentinel["state"] != expected:
        message = f"After the malformed request {name} an ordinary request is no longer answered as before."
        found = sentinel["state"] or sentinel["detail"]
        yield finding("sentinel-differs", message, pointer=name, found=found, expected=expected, advice=advice)


def _measurements(rule: CompatibilityRule, bundle: Bundle, records: Records) -> list[Measurement]:
    start, cases = records["start"], records["cases"]
    seconds = [record["exchange"]["seconds"] for record in cases]
    refused = sum(1 for record in cases if 400 <= record["exchange"]["status"] < 500)
    accepted = sum(1 for record in cases if record["exchange"]["status"] == 200)
    return [
        Measurement(
            name="ready",
            unit="ms",
            statistic="value",
            value=start["ready_ms"],
            n=0 if start["ready_ms"] is None else 1,
            limit=float(rule.boot_seconds * 1000),
        ),
        Measurement(
            name="context",
            unit="tokens",
            statistic="value",
            value=start["context_tokens"],
            n=1 if start["context_tokens"] else 0,
            limit=bundle.runtime.context_tokens,
        ),
        Measurement(name="malformed_refused", unit="count", statistic="value", value=refused, n=len(cases), k=refused),
        Measurement(
            name="malformed_accepted", unit="count", statistic="value", value=accepted, n=len(cases), k=accepted
        ),
        Measurement(
            name="malformed_answer",
            unit="seconds",
            statistic="max",
            value=max(seconds, default=None),
            n=len(cases),
            limit=float(rule.answer_seconds),
        ),
    ]


GATE = Gate(
    name="compatibility",
    version=3,
    depends_on=(
        *("weights", "tokenizer", "template", "quantization", "adapters", "draft", "engine", "topology", "hardware"),
        *("runtime", "serving"),
    ),
    measure=measure,
    judge=judge,
    watches_process=True,
)
