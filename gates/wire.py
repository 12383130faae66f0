"""What an OpenAI-compatible answer must look like, checked over recorded bytes. Pure.

Each check takes recorded exchanges and yields findings; it yields none for an answer that keeps the format.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gates.gate import Records, finding
from schemas.result import Finding

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
CLOCK_SECONDS = 300
DONE = "[DONE]"
REPLACEMENT = "\ufffd"
_OBJECTS = {True: ("chat.completion", "chat.completion.chunk"), False: ("text_completion", "text_completion")}


@dataclass(slots=True)
class Stream:
    """A recorded event stream, read: its events in order, and what they say together."""

    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    problems: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    usages: list[tuple[dict[str, Any], list[Any]]] = field(default_factory=list)
    has_text_after_finish: bool = False

    @property
    def text(self) -> str:
        """All text of the answer."""
        return "".join(self.texts)


class _Check:
    """Collects findings about one exchange under its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []

    def expect(
        self, condition: bool, code: str, message: str, *, found: object = None, expected: object = None
    ) -> bool:
        """Note a finding unless the condition holds; return the condition."""
        if not condition:
            self.bad(code, message, found=found, expected=expected)
        return condition

    def bad(self, code: str, message: str, *, found: object = None, expected: object = None) -> None:
        """Note a finding."""
        text = f"{self.name}: {message}"
        self.findings.append(finding(code, text, pointer=self.name, found=found, expected=expected))


def answered(name: str, exchange: Records) -> list[Finding]:
    """Check that an exchange ended with status 200 and UTF-8."""
    check = _Check(name)
    if check.expect(exchange["problem"] is None, "no-answer", f"the engine did not answer: {exchange['problem']}."):
        status, body = exchange["status"], exchange["body"]
        check.expect(status == 200, "status", f"status {status}.", found=f"{status} {body[:500]}", expected=200)
        check.expect(exchange["is_utf8"], "not-utf8", "the answer is not UTF-8.")
    return check.findings


def plain(name: str, exchange: Records, *, model: str, max_tokens: int, is_chat: bool) -> list[Finding]:
    """Check one answer that was not streamed."""
    if found := answered(name, exchange):
        return found
    check = _Check(name)
    kind = exchange["content_type"].split(";")[0].strip()
    check.expect(kind == "application/json", "content-type", "the answer is not JSON by its type.", found=kind)
    body = read_json(exchange["body"])
    if not check.expect(
        isinstance(body, dict), "not-json", "the answer is no JSON object.", found=exchange["body"][:500]
    ):
        return check.findings
    _envelope(check, body, exchange, model=model, expected=_OBJECTS[is_chat][0])
    choices = body.get("choices")
    if check.expect(
        isinstance(choices, list) and len(choices) == 1, "choices", "there is not one choice.", found=choices
    ):
        _choice(check, choices[0], is_chat=is_chat)
        _usage(check, body.get("usage"), max_tokens, choices[0] if isinstance(choices[0], dict) else {})
    return check.findings


def streamed(
    name: str, exchange: Records, *, model: str, max_tokens: int, is_chat: bool, wants_usage: bool
) -> list[Finding]:
    """Check one streamed answer."""
    if found := answered(name, exchange):
        return found
    check = _Check(name)
    kind = exchange["content_type"].split(";")[0].strip()
    check.expect(kind == "text/event-stream", "content-type", "the stream is not text/event-stream.", found=kind)
    stream = read_stream(exchange["body"], is_chat=is_chat)
    for problem in stream.problems:
        check.bad("event-malformed", problem)
    if not check.expect(bool(stream.events), "stream-empty", "the stream has no event.", found=exchange["body"][:500]):
        return check.findings
    check.expect(stream.is_done, "stream-cut", "the stream does not end with [DONE].", found=exchange["body"][-500:])
    for event in stream.events:
        _envelope(check, event, exchange, model=model, expected=_OBJECTS[is_chat][1])
    identities = sorted({str(event.get("id")) for event in stream.events})
    check.expect(len(identities) == 1, "stream-ids", "the events of one answer have several ids.", found=identities)
    finishes = stream.finishes
    check.expect(
        len(finishes) == 1 and finishes[0] in FINISH_REASONS,
        "finish-reason",
        "the stream does not name one finish reason.",
        found=finishes,
        expected="one of " + ", ".join(sorted(FINISH_REASONS)),
    )
    check.expect(not stream.has_text_after_finish, "text-after-finish", "text follows the finish reason.")
    if is_chat:
        _first_delta(check, stream.events)
        _stream_usage(check, stream, max_tokens, wants_usage=wants_usage)
    return _distinct(check.findings)


def same_text(name: str, whole: Records, parts: Records, *, is_chat: bool) -> list[Finding]:
    """Check that a stream adds up to the text of the plain answer, at temperature 0.

    A character that the token limit cut in two is U+FFFD in the plain answer and nothing in the stream.
    """
    left = text_of(whole["body"], is_chat=is_chat)
    right = read_stream(parts["body"], is_chat=is_chat).text
    if left is not None and left.rstrip(REPLACEMENT) == right.rstrip(REPLACEMENT):
        return []
    message = f"{name}: the streamed text is not that of the plain answer."
    advice = "Streaming loses or changes text in this engine: try another version, or another template parser."
    return [finding("stream-differs", message, pointer=name, found=repr(right), expected=repr(left), advice=advice)]


def stopped(name: str, text: str | None, *, whole: str, stop: str) -> list[Finding]:
    """Check that an answer ends before its stop string."""
    expected = whole[: whole.index(stop)]
    if text == expected:
        return []
    message = f"{name}: the stop string {stop!r} did not end the answer where it first occurs."
    return [finding("stop-ignored", message, pointer=name, found=repr(text), expected=repr(expected))]


def logprobs(name: str, exchange: Records, *, top: int) -> list[Finding]:
    """Check the log-probabilities of a plain chat answer: bytes add up to the text, values and order are right."""
    if found := answered(name, exchange):
        return found
    check = _Check(name)
    body = read_json(exchange["body"])
    choice = first_choice(body)
    entries = (choice.get("logprobs") or {}).get("content") if isinstance(choice.get("logprobs"), Mapping) else None
    if not check.expect(isinstance(entries, list) and bool(entries), "logprobs", "declared, but none are answered."):
        return check.findings
    joined = b""
    for entry in entries or []:
        if not check.expect(_is_logprob(entry), "logprobs", "an entry is malformed.", found=entry):
            return check.findings
        joined += bytes(entry["bytes"] or [])
        values = [one["logprob"] for one in entry["top_logprobs"]]
        check.expect(
            len(values) == top, "logprobs", "the best list has another length.", found=len(values), expected=top
        )
        check.expect(values == sorted(values, reverse=True), "logprobs", "the best list is not sorted.", found=values)
        best = [one["bytes"] for one in entry["top_logprobs"]]
        check.expect(
            entry["bytes"] in best, "logprobs", "the greedy token is not among the best.", found=entry["token"]
        )
    text = (text_of(exchange["body"], is_chat=True) or "").rstrip(REPLACEMENT)
    check.expect(joined.startswith(text.encode()), "logprobs", "the tokens do not add up to the text.", found=joined)
    return _distinct(check.findings)


def _is_logprob(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("top_logprobs"), list):
        return False
    for one in [entry, *entry["top_logprobs"]]:
        if not isinstance(one, dict) or not isinstance(one.get("bytes"), list | None):
            return False
        value = one.get("logprob")
        if isinstance(value, bool) or not isinstance(value, int | float) or value > 1e-4:
            return False
    return isinstance(entry.get("token"), str)


def _envelope(check: _Check, body: Mapping[str, Any], exchange: Records, *, model: str, expected: str) -> None:
    check.expect(body.get("object") == expected, "object", "wrong object.", found=body.get("object"), expected=expected)
    identity = body.get("id")
    check.expect(isinstance(identity, str) and identity != "", "id", "no id.", found=identity)
    check.expect(body.get("model") == model, "model", "another model answers.", found=body.get("model"), expected=model)
    created = body.get("created")
    # The machine's clock may be set while the engine answers: then one of the two is far from it.
    instants = [exchange["sent_at"], exchange.get("ended_at", exchange["sent_at"])]
    is_now = isinstance(created, int) and any(abs(created - at) <= CLOCK_SECONDS for at in instants)
    check.expect(is_now, "created", "created is not now in Unix seconds.", found=created, expected=int(instants[0]))


def _choice(check: _Check, choice: Any, *, is_chat: bool) -> None:
    if not check.expect(isinstance(choice, dict), "choices", "the choice is no object.", found=choice):
        return
    check.expect(
        choice.get("index") == 0, "index", "the choice has another index.", found=choice.get("index"), expected=0
    )
    reason = choice.get("finish_reason")
    check.expect(
        reason in FINISH_REASONS,
        "finish-reason",
        "no finish reason." if reason is None else f"unknown finish reason {reason!r}.",
        found=reason,
        expected="one of " + ", ".join(sorted(FINISH_REASONS)),
    )
    if not is_chat:
        check.expect(isinstance(choice.get("text"), str), "text", "the text is no string.", found=choice.get("text"))
        return
    message = choice.get("message")
    if check.expect(isinstance(message, dict), "message", "there is no message.", found=message):
        role, content = message.get("role"), message.get("content")
        check.expect(role == "assistant", "role", "another role answers.", found=role, expected="assistant")
        is_text = isinstance(content, str) or (content is None and reasoning_of(message) is not None)
        check.expect(is_text, "content", "the content is no string.", found=content)


def _usage(check: _Check, usage: Any, max_tokens: int, choice: Mapping[str, Any]) -> None:
    if not check.expect(isinstance(usage, dict), "usage", "there is no usage.", found=usage):
        return
    counts = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion", "total")]
    if not check.expect(all(is_count(count) for count in counts), "usage", "counts are no counts.", found=usage):
        return
    prompt, completion, total = counts
    check.expect(prompt + completion == total, "usage", "prompt and completion are not the total.", found=usage)
    check.expect(prompt > 0, "usage", "the prompt has no tokens.", found=usage)
    check.expect(
        completion <= max_tokens, "max-tokens", "more tokens than allowed.", found=completion, expected=max_tokens
    )
    if completion < max_tokens and choice.get("finish_reason") == "length":
        message = f"finish reason length after {completion} of {max_tokens} tokens, far from the context's end."
        check.bad("finish-reason", message, found=completion, expected=max_tokens)


def _first_delta(check: _Check, events: Sequence[Mapping[str, Any]]) -> None:
    first = next((choice for event in events if (choice := first_choice(event))), {})
    delta = first.get("delta")
    role = delta.get("role") if isinstance(delta, Mapping) else None
    check.expect(role == "assistant", "role", "the first delta has no role.", found=delta, expected="assistant")


def _stream_usage(check: _Check, stream: Stream, max_tokens: int, *, wants_usage: bool) -> None:
    if not wants_usage:
        check.expect(
            not stream.usages, "usage-unasked", "usage was sent without include_usage.", found=stream.usages[:1]
        )
        return
    count = len(stream.usages)
    if check.expect(count == 1, "usage", "usage was asked for and not sent once.", found=count, expected=1):
        usage, choices = stream.usages[0]
        check.expect(choices == [], "usage", "the event with usage has choices.", found=choices, expected="[]")
        _usage(check, usage, max_tokens, {"finish_reason": stream.finishes[0] if stream.finishes else None})


def read_stream(body: str, *, is_chat: bool) -> Stream:
    """Read the text of an event stream; comments are allowed, and `problems` says what is malformed."""
    stream = Stream()
    for block in body.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        if stream.is_done:
            stream.problems.append(f"an event follows [DONE]: {block[:200]!r}.")
            continue
        if any(line.startswith("error:") for line in lines):
            stream.problems.append(f"the stream carries an error: {block[:500]!r}.")
            continue
        data = "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines if line.startswith("data:"))
        if data == DONE:
            stream.is_done = True
            continue
        event = read_json(data)
        if not isinstance(event, dict):
            stream.problems.append(f"an event is no JSON object: {block[:200]!r}.")
            continue
        if "error" in event:
            stream.problems.append(f"the stream carries an error: {block[:500]!r}.")
            continue
        stream.events.append(event)
        _read_event(stream, event, is_chat=is_chat)
    return stream


def _read_event(stream: Stream, event: dict[str, Any], *, is_chat: bool) -> None:
    choices = event.get("choices")
    if not isinstance(choices, list):
        stream.problems.append(f"an event has no list of choices: {json.dumps(event)[:200]}.")
        return
    if isinstance(event.get("usage"), dict):
        stream.usages.append((event["usage"], choices))
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("index") != 0:
            stream.problems.append(f"a choice has no index 0: {json.dumps(choice)[:200]}.")
            continue
        delta = choice.get("delta")
        text = choice.get("text") if not is_chat else delta.get("content") if isinstance(delta, dict) else None
        if isinstance(text, str) and text:
            stream.has_text_after_finish |= bool(stream.finishes)
            stream.texts.append(text)
        if choice.get("finish_reason") is not None:
            stream.finishes.append(str(choice["finish_reason"]))


def read_json(text: str) -> Any:
    """Return the JSON value of a text, or None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def first_choice(body: Any) -> dict[str, Any]:
    """Return the first choice of an answer or event; empty when it has none."""
    choices = body.get("choices") if isinstance(body, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def text_of(body: str, *, is_chat: bool) -> str | None:
    """Return the text of a plain answer; None when it has none."""
    choice = first_choice(read_json(body))
    holder, key = (choice.get("message"), "content") if is_chat else (choice, "text")
    text = holder.get(key) if isinstance(holder, dict) else None
    if text is None and isinstance(holder, dict) and reasoning_of(holder) is not None:
        return ""
    return text if isinstance(text, str) else None


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning text, which engines carry under two names."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            return str(message[key])
    return None


def is_count(value: Any) -> bool:
    """Tell whether a JSON value is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))
