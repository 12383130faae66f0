"""Requests that no client should send, and what an engine may answer to each. Pure.

The rule: status 4xx with a JSON error that says something, in time, and the engine lives on unchanged. What an engine
is known to answer instead is in `gates.leniency`. Of an engine that nobody has asked all of this, an acceptance proves
neither a fault nor its absence: it is a warning, which a person accepts or not. A server error, a refusal that says
nothing and silence are faults of any engine.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gates.dialects.base import error_message
from gates.gate import Records, finding
from gates.leniency import LENIENCY, UNKNOWN, Leniency
from gates.wire import FINISH_REASONS, first_choice, read_json, read_stream
from schemas.result import Finding, Severity

JSON = "application/json"
NESTING = 10_000
HANG_UPS = 5


class End(StrEnum):
    """How the client ends the exchange."""

    READ = "read"
    """It reads the whole answer."""
    FIRST_EVENT = "first_event"
    """It hangs up after the first event of a stream."""
    SENT = "sent"
    """It hangs up as soon as the request is sent."""
    HALF_SENT = "half_sent"
    """It hangs up in the middle of the body that it announced."""


@dataclass(frozen=True, slots=True)
class Case:
    """One misuse: a malformed request, or with `is_valid` a good one whose client leaves early."""

    name: str
    body: bytes
    route: str = "chat"
    content_type: str = JSON
    end: End = End.READ
    is_valid: bool = False


def cases(model: str, *, context_tokens: int, has_completions: bool) -> list[Case]:
    """Return the malformed requests for one engine.

    Args:
        model: its served name.
        context_tokens: context of one request; the over-long prompt has at least twice as many tokens.
        has_completions: whether the bundle declares the completions route too.
    """
    chat = {"model": model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 2, "temperature": 0}
    whole = json.dumps(chat)
    nested = "[" * NESTING + "]" * NESTING
    found = [
        Case("not-json", b"ping"),
        Case("json-cut", whole[:-9].encode()),
        Case("json-trailing-text", whole.encode() + b" ping"),
        Case("json-nan", whole.replace('"temperature": 0', '"temperature": NaN').encode()),
        Case("json-number-overflow", whole.replace('"temperature": 0', '"temperature": 1e400').encode()),
        Case("json-nested-messages", f'{{"model": {json.dumps(model)}, "messages": {nested}}}'.encode()),
        Case("json-nested-unknown-field", f'{whole[:-1]}, "wish": {nested}}}'.encode()),
        Case("body-empty", b""),
        Case("body-array", b"[]"),
        Case("body-null", b"null"),
        Case("content-type-text", whole.encode(), content_type="text/plain"),
        Case("text-surrogate", whole.replace("ping", "\\ud800").encode()),
        Case("text-not-utf8", whole.encode().replace(b"ping", b"\xff\xfe\xc0")),
        Case("text-nul", whole.encode().replace(b"ping", b"a\x00b")),
        Case("text-nul-escaped", whole.replace("ping", "a\\u0000b").encode()),
        Case("route-unknown", whole.encode(), route="unknown"),
        *_fields(chat),
        *_messages(chat),
    ]
    words = "x " * (2 * context_tokens)
    found.append(Case("prompt-over-long", _with(chat, messages=[{"role": "user", "content": words}])))
    if has_completions:
        found += _prompts({key: chat[key] for key in ("model", "max_tokens", "temperature")})
    return found + list(_hang_ups(chat, context_tokens))


def _with(body: Mapping[str, Any], **changes: Any) -> bytes:
    return json.dumps({key: value for key, value in {**body, **changes}.items() if value is not ...}).encode()


def _fields(chat: Mapping[str, Any]) -> Iterator[Case]:
    changes: dict[str, dict[str, Any]] = {
        "max-tokens-negative": {"max_tokens": -5},
        "max-tokens-zero": {"max_tokens": 0},
        "max-tokens-overflow": {"max_tokens": 2**31},
        "max-tokens-text": {"max_tokens": "five"},
        "max-tokens-list": {"max_tokens": [5]},
        "temperature-text": {"temperature": "hot"},
        "temperature-negative": {"temperature": -1},
        "top-p-text": {"top_p": "x"},
        "seed-text": {"seed": "x"},
        "n-zero": {"n": 0},
        "n-huge": {"n": 1000},
        "stop-numbers": {"stop": [1, 2]},
        "stream-text": {"stream": "yes"},
        "top-logprobs-negative": {"logprobs": True, "top_logprobs": -1},
        "response-format-unknown": {"response_format": {"type": "poem"}},
        "schema-nonsense": {"response_format": _schema({"type": "nonsense"})},
        "schema-reference-missing": {"response_format": _schema({"$ref": "#/nowhere"})},
        "schema-pattern-broken": {"response_format": _schema({"type": "string", "pattern": "^(((($"})},
        "tools-text": {"tools": "x"},
        "tool-type-unknown": {"tools": [{"type": "wish"}]},
        "tool-choice-unknown": {"tool_choice": "maybe"},
        "model-unknown": {"model": "no-such-model"},
        "field-unknown": {"wish": 5},
    }
    for name, change in changes.items():
        if name == "max-tokens-overflow":
            # Where it is accepted, the answer has no end: the first event is answer enough.
            yield Case(name, _with(chat, **change, stream=True), end=End.FIRST_EVENT)
        else:
            yield Case(name, _with(chat, **change))


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "case", "schema": schema}}


def _messages(chat: Mapping[str, Any]) -> Iterator[Case]:
    changes: dict[str, Any] = {
        "messages-missing": ...,
        "messages-empty": [],
        "messages-null": None,
        "messages-text": "ping",
        "messages-of-texts": ["ping"],
        "content-missing": [{"role": "user"}],
        "content-number": [{"role": "user", "content": 5}],
        "content-object": [{"role": "user", "content": {"a": 1}}],
        "content-part-unknown": [{"role": "user", "content": [{"type": "wish"}]}],
        "content-image-of-a-file": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}
        ],
        "role-missing": [{"content": "ping"}],
        "role-number": [{"role": 5, "content": "ping"}],
        "role-unknown": [{"role": "wizard", "content": "ping"}],
        "tool-answer-without-call": [{"role": "tool", "content": "ping"}],
        "tool-calls-text": [{"role": "assistant", "tool_calls": "x"}],
    }
    for name, messages in changes.items():
        yield Case(name, _with(chat, messages=messages))


def _prompts(base: Mapping[str, Any]) -> Iterator[Case]:
    changes: dict[str, Any] = {
        "prompt-missing": ...,
        "prompt-empty": "",
        "prompt-number": 5,
        "prompt-object": {"a": 1},
        "prompt-list-empty": [],
        "prompt-token-negative": [-1],
        "prompt-token-beyond-vocabulary": [2**30],
    }
    for name, prompt in changes.items():
        yield Case(name, _with(base, prompt=prompt), route="completions")


def _hang_ups(chat: Mapping[str, Any], context_tokens: int) -> Iterator[Case]:
    # Long enough that an engine that does not notice is still at work long after.
    body = _with(chat, max_tokens=max(1, context_tokens // 2), stream=True)
    yield Case("hang-up-in-the-body", body, end=End.HALF_SENT)
    yield Case("hang-up-before-the-answer", body, end=End.SENT, is_valid=True)
    for number in range(1, HANG_UPS + 1):
        yield Case(f"hang-up-in-the-stream-{number}", body, end=End.FIRST_EVENT, is_valid=True)


def judge_answer(case: Case, exchange: Records, *, engine: str, version: str, limit_seconds: float) -> list[Finding]:
    """Judge the engine's answer to one case: nothing to find where it keeps the rule."""
    problem, status, body = exchange["problem"], exchange["status"], exchange["body"]
    if case.end in {End.SENT, End.HALF_SENT}:
        return []
    if exchange["seconds"] > limit_seconds or problem == "timeout":
        message = f"{case.name}: no answer within {limit_seconds:g} s."
        return [_bad("malformed-hang", case, message, found=f"{exchange['seconds']:.3f} s")]
    if problem is not None:
        message = f"{case.name}: the engine broke the connection off ({problem})."
        return [_bad("malformed-no-answer", case, message, found=problem)]
    if case.is_valid:
        if status == 200:
            return []
        message = f"{case.name}: a request that is in order was refused with {status}."
        return [_bad("refused", case, message, found=f"{status} {body[:500]}", expected="200")]
    known = LENIENCY.get(engine, UNKNOWN)
    said = error_message(read_json(body))
    if status == 200:
        return _judge_accepted(case, exchange, known, version)
    if 400 <= status < 500:
        if said:
            return []
        message = f"{case.name}: refused with {status}, without a JSON error that says why."
        return [_bad("malformed-silent", case, message, found=f"{status} {body[:500]}")]
    allowed = known.errors.get(case.name)
    if allowed and status == allowed.status and said and said.startswith(allowed.message):
        severity = Severity.INFO if version in known.seen else Severity.WARN
        message = f"{case.name}: refused as a server error ({status}), as {engine} does: {allowed.reason}"
        return [finding("malformed-server-error-known", message, severity=severity, pointer=case.name, found=said)]
    message = f"{case.name}: answered with {status}, where the client is at fault."
    return [_bad("malformed-server-error", case, message, found=f"{status} {body[:500]}", expected="4xx")]


def _judge_accepted(case: Case, exchange: Records, known: Leniency, version: str) -> list[Finding]:
    body = exchange["body"]
    is_known = case.name in known.accepts
    if known.is_whole and not is_known:
        message = f"{case.name}: accepted; a client would believe that it had been understood."
        return [_bad("malformed-accepted", case, message, found=f"200 {body[:500]}", expected="4xx")]
    if not _is_answer(case, exchange):
        message = f"{case.name}: accepted, and the answer is not a whole one."
        return [_bad("malformed-accepted", case, message, found=f"200 {body[:500]}")]
    if version in known.seen:
        return []
    if is_known and known.is_whole:
        message = f"{case.name}: accepted, as in other versions of this engine; not seen in {version} before."
        return [finding("malformed-accepted-known", message, severity=Severity.WARN, pointer=case.name)]
    if is_known:
        message = f"{case.name}: accepted, as the engine documents it: {known.source}."
        return [finding("malformed-accepted-documented", message, severity=Severity.INFO, pointer=case.name)]
    code = "malformed-accepted-unknown"
    message = f"{case.name}: accepted. Whether this engine means to is not known here, and other engines refuse it."
    advice = "Look into the engine's documentation, and accept the finding if callers may send this."
    if case.name in known.refuses:
        # It may be another engine behind a like API, or a version that changed: a person has to know, and may accept.
        code = "malformed-accepted-unlike"
        message = f"{case.name}: accepted, although it is documented to be refused: {known.source}."
        advice = "Look what answers there: a misspelt option of a caller would be ignored without a word."
    return [
        finding(
            code,
            message,
            severity=Severity.WARN,
            pointer=case.name,
            found=f"200 {body[:500]}",
            expected="4xx, or an acceptance that its documentation names",
            advice=advice,
        )
    ]


def _is_answer(case: Case, exchange: Records) -> bool:
    """Tell whether the answer is one: whole, or begun where the client left after the first event."""
    stream = read_stream(exchange["body"], is_chat=True)
    if case.end is not End.READ:
        return bool(stream.events)
    if exchange["content_type"].startswith("text/event-stream"):
        return not stream.problems and bool(stream.finishes) and FINISH_REASONS.issuperset(stream.finishes)
    return first_choice(read_json(exchange["body"])).get("finish_reason") in FINISH_REASONS


def _bad(code: str, case: Case, message: str, *, found: str, expected: str | None = None) -> Finding:
    advice = "Use an engine version that survives this request, or keep the request from it at the gateway."
    return finding(code, message, pointer=case.name, found=found, expected=expected, advice=advice)
