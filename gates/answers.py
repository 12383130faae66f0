"""Reads generations: what an answer says, how it ended, and when its parts came. Pure."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gates.dialects.base import Dialect, Malformed, Piece, Token, Usage
from gates.sse import Event, EventParser

FINISHED = frozenset({"stop", "length", "tool_calls"})
DETAIL_CHARACTERS = 500
CUT = "the connection was cut"
"""Begins the detail of an answer whose end the transport reported: a client could tell that it was not whole."""
_DONE = "[DONE]"


class Outcome(StrEnum):
    """How a request ended. Only `ok` is a success."""

    OK = "ok"
    CONNECT = "connect"
    """No connection."""
    TIMEOUT = "timeout"
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    TRUNCATED = "truncated"
    """The answer ended early: no finish, no [DONE], a cut connection."""
    ERROR_EVENT = "error_event"
    """The engine reported an error after it had begun to answer."""
    MALFORMED = "malformed"
    """Not what the dialect promises."""
    EMPTY = "empty"
    """Finished without text, reasoning or tool call."""


@dataclass(frozen=True)
class Answer:
    """One generation. Instants are `time.perf_counter_ns`; None when that moment never came.

    `first_token_ns` is the first event with text, reasoning or a tool call, not the role-only event before it.
    `output_ns` holds the instant of every such event, first to last: the gaps are those between events, of which
    one may carry several tokens. `finish_ns` is the event with the finish reason, which stands for the end-of-turn
    token that carries no text. `tokens` are those the engine told, with ids and log-probabilities, when asked.
    """

    outcome: Outcome
    detail: str = ""
    status: int = 0
    sent_ns: int = 0
    headers_ns: int | None = None
    first_event_ns: int | None = None
    output_ns: tuple[int, ...] = ()
    finish_ns: int | None = None
    done_ns: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    model: str | None = None
    events: int = 0

    @property
    def is_ok(self) -> bool:
        """Whether the answer is whole."""
        return self.outcome is Outcome.OK

    @property
    def first_token_ns(self) -> int | None:
        """Instant of the first output."""
        return self.output_ns[0] if self.output_ns else None

    @property
    def last_token_ns(self) -> int | None:
        """Instant of the last output."""
        return self.output_ns[-1] if self.output_ns else None

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from sending to the first output."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.sent_ns) / 1e6

    @property
    def digest(self) -> str | None:
        """SHA-256 of everything generated, in hexadecimal; None when nothing was."""
        if not self.output_ns:
            return None
        said = json.dumps([self.reasoning, self.text, [dict(call) for call in self.tool_calls]])
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Ids of the tokens; None when the engine did not tell all of them."""
        ids = tuple(token.id for token in self.tokens if token.id is not None)
        return ids if ids and len(ids) == len(self.tokens) else None


def merge_tool_calls(deltas: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Join tool-call deltas by index: id, type and name as first given, arguments appended in order."""
    calls: dict[int, dict[str, Any]] = {}
    for place, delta in enumerate(deltas):
        function = delta.get("function") or {}
        call = calls.setdefault(
            int(delta.get("index", place)), {"id": None, "type": "function", "name": "", "arguments": ""}
        )
        call["id"] = call["id"] or delta.get("id")
        call["type"] = delta.get("type") or call["type"]
        call["name"] = call["name"] or function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""
    return tuple(calls[index] for index in sorted(calls))


def judge(pieces: Sequence[Piece], *, is_complete: bool) -> tuple[Outcome, str]:
    """Tell how a generation ended, from its pieces and whether its end was seen.

    Success is no error, exactly one finish of stop, length or tool_calls, nothing produced after it, some output,
    and a seen end ([DONE], or the whole body of a plain answer).
    """
    finishes = [place for place, piece in enumerate(pieces) if piece.finish_reason is not None]
    for piece in pieces:
        if piece.error is not None:
            return Outcome.ERROR_EVENT, piece.error[:DETAIL_CHARACTERS]
    if not finishes:
        return Outcome.TRUNCATED, "no finish reason"
    if len(finishes) > 1:
        return Outcome.MALFORMED, f"{len(finishes)} finish reasons"
    reason = pieces[finishes[0]].finish_reason
    if reason == "abort":
        return Outcome.TRUNCATED, "the engine aborted the request"
    if reason not in FINISHED:
        return Outcome.MALFORMED, f"finish reason {reason!r}"
    if any(piece.carries_output for piece in pieces[finishes[0] + 1 :]):
        return Outcome.MALFORMED, "output after the finish reason"
    if not is_complete:
        return Outcome.TRUNCATED, f"the stream ended without {_DONE}"
    if not any(piece.carries_output for piece in pieces):
        return Outcome.EMPTY, f"finished ({reason}) without output"
    return Outcome.OK, ""


class Stream:
    """Collects a stream's events with their instants. Read when it is over, so that reading delays no event."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._parser = EventParser()
        self._events: list[tuple[int, Event]] = []
        self.is_done = False

    def feed(self, now_ns: int, chunk: bytes) -> None:
        """Take bytes that arrived at `now_ns`. Raises NotUtf8."""
        for event in self._parser.feed(chunk):
            if event.data == _DONE and not event.name:
                self.is_done = True
            else:
                self._events.append((now_ns, event))

    def read(self) -> Answer:
        """Read what has arrived into an answer, without instants of sending and ending."""
        pieces: list[tuple[int, Piece]] = []
        broken = ""
        for now_ns, event in self._events:
            try:
                pieces.append((now_ns, self._piece(event)))
            except (Malformed, ValueError) as error:
                broken = f"event {len(pieces)}: {error}"[:DETAIL_CHARACTERS]
                break
        said = [piece for _, piece in pieces]
        # Where a dialect has no [DONE], whoever fed the stream knows whether its connection ended well.
        is_complete = self.is_done or not self._dialect.has_done
        outcome, detail = (Outcome.MALFORMED, broken) if broken else judge(said, is_complete=is_complete)
        return replace(
            joined(said),
            outcome=outcome,
            detail=detail,
            first_event_ns=self._events[0][0] if self._events else None,
            output_ns=tuple(now_ns for now_ns, piece in pieces if piece.carries_output),
            finish_ns=next((now_ns for now_ns, piece in pieces if piece.finish_reason is not None), None),
            events=len(self._events),
        )

    def _piece(self, event: Event) -> Piece:
        try:
            body = json.loads(event.data)
        except ValueError as error:
            if event.name == "error":
                return Piece(error=event.data)
            raise Malformed(f"not JSON: {error}") from None
        if event.name == "error" and isinstance(body, Mapping) and "error" not in body:
            body = {"error": body}
        return self._dialect.read_event(body)


def joined(pieces: Sequence[Piece]) -> Answer:
    """Join pieces of one generation into an answer, without judging it."""
    return Answer(
        outcome=Outcome.OK,
        text="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=merge_tool_calls(call for piece in pieces for call in piece.tool_calls),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason=next((piece.finish_reason for piece in pieces if piece.finish_reason is not None), None),
        usage=next((piece.usage for piece in reversed(pieces) if piece.usage is not None), None),
        model=next((piece.model for piece in pieces if piece.model is not None), None),
        events=len(pieces),
    )


def read_plain(dialect: Dialect, body: bytes, done_ns: int) -> Answer:
    """Read the body of a plain answer that arrived whole at `done_ns`."""
    try:
        piece = dialect.read_answer(json.loads(body))
    except (Malformed, ValueError) as error:
        return Answer(Outcome.MALFORMED, str(error)[:DETAIL_CHARACTERS])
    outcome, detail = judge([piece], is_complete=True)
    return replace(
        joined([piece]),
        outcome=outcome,
        detail=detail,
        first_event_ns=done_ns,
        output_ns=(done_ns,) if piece.carries_output else (),
        finish_ns=done_ns if piece.finish_reason is not None else None,
    )
