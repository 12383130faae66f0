"""Talks to one engine over HTTP and says exactly what came back, and when.

Built for measuring: aiohttp without a limit on connections, one connection a request unless asked otherwise, no
retries, no redirects, and the time of every event taken before its content is read. An answer counts as `ok` only
when it is whole.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import aiohttp

from gates.dialect import (
    GREEDY,
    Dialect,
    Malformed,
    Message,
    Piece,
    Request,
    Sampling,
    ServedModel,
    Token,
    Usage,
    error_message,
    parse_metrics,
)
from gates.sse import Event, EventParser, NotUtf8

FINISHED = frozenset({"stop", "length", "tool_calls"})
_DONE = "[DONE]"
_DETAIL_CHARACTERS = 500
_READ_BUFFER_BYTES = 1 << 20


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


class EndpointError(RuntimeError):
    """A request that is no generation (model list, tokens, metrics) did not work. `outcome` says how."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome
        self.detail = detail


@dataclass(frozen=True)
class Reply:
    """A raw answer. `status` 0 when there was none; `outcome` is then connect, timeout or truncated."""

    outcome: Outcome
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    detail: str = ""
    sent_ns: int = 0
    headers_ns: int | None = None
    done_ns: int = 0


@dataclass(frozen=True)
class Answer:
    """One generation. Instants are `time.perf_counter_ns`; None when that moment never came.

    `first_token_ns` is the first event with text, reasoning or a tool call, not the role-only event before it.
    `output_ns` holds the instant of every such event, first to last: the gaps are those between events, of which
    one may carry several tokens. `tokens` are those the engine told, with ids and log-probabilities, when asked.
    """

    outcome: Outcome
    detail: str = ""
    status: int = 0
    sent_ns: int = 0
    headers_ns: int | None = None
    first_event_ns: int | None = None
    output_ns: tuple[int, ...] = ()
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
            return Outcome.ERROR_EVENT, piece.error[:_DETAIL_CHARACTERS]
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
                broken = f"event {len(pieces)}: {error}"[:_DETAIL_CHARACTERS]
                break
        said = [piece for _, piece in pieces]
        outcome, detail = (Outcome.MALFORMED, broken) if broken else judge(said, is_complete=self.is_done)
        return replace(
            _joined(said),
            outcome=outcome,
            detail=detail,
            first_event_ns=self._events[0][0] if self._events else None,
            output_ns=tuple(now_ns for now_ns, piece in pieces if piece.carries_output),
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


def _joined(pieces: Sequence[Piece]) -> Answer:
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


def _status_outcome(status: int) -> Outcome:
    if status == 200:
        return Outcome.OK
    if status >= 500:
        return Outcome.HTTP_5XX
    return Outcome.HTTP_4XX if status >= 400 else Outcome.MALFORMED


def _error_detail(status: int, body: bytes) -> str:
    text = body.decode("utf-8", errors="replace")
    try:
        text = error_message(json.loads(text)) or text
    except ValueError:
        pass
    return f"{status}: {text}"[:_DETAIL_CHARACTERS]


class Endpoint:
    """One engine, or a gateway in front of engines: base URL, model name and dialect.

    Use as an asynchronous context manager. With `reuse_connections` False, which is right on one machine, every
    request opens a connection: an idle one holds a thread of llama.cpp, and a stale one looks like a failure.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        dialect: Dialect,
        *,
        headers: Mapping[str, str] | None = None,
        reuse_connections: bool = False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.dialect = dialect
        self._headers = dict(headers or {})
        self._reuse_connections = reuse_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not self._reuse_connections),
            headers=self._headers,
            read_bufsize=_READ_BUFFER_BYTES,
            trust_env=False,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the endpoint as an asynchronous context manager")
        return self._session

    # ----------------------------------------------------------------------------------------- generations

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        stream: bool = True,
        sampling: Sampling = GREEDY,
        top_logprobs: int | None = None,
        use_cache: bool = False,
        template_arguments: Mapping[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask for a chat answer. Never raises for what the engine does: `Answer.outcome` says it."""
        request = self.dialect.chat(
            self.model,
            messages,
            max_tokens=max_tokens,
            stream=stream,
            sampling=sampling,
            top_logprobs=top_logprobs,
            use_cache=use_cache,
            template_arguments=template_arguments,
            extra=extra,
        )
        return await self.generate(request, timeout_seconds=timeout_seconds, headers=headers)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stream: bool = True,
        sampling: Sampling = GREEDY,
        top_logprobs: int | None = None,
        use_cache: bool = False,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Continue a text or a list of token ids. Never raises for what the engine does."""
        request = self.dialect.completion(
            self.model,
            prompt,
            max_tokens=max_tokens,
            stream=stream,
            sampling=sampling,
            top_logprobs=top_logprobs,
            use_cache=use_cache,
            extra=extra,
        )
        return await self.generate(request, timeout_seconds=timeout_seconds, headers=headers)

    async def generate(
        self, request: Request, *, timeout_seconds: float = 120.0, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a generation request; its body's `stream` says how the answer is read."""
        is_stream = bool((request.body or {}).get("stream"))
        stream = Stream(self.dialect)
        reply = await self._send(
            "POST",
            request.path,
            _encoded(request),
            stream=stream if is_stream else None,
            timeout_seconds=timeout_seconds,
            headers=headers,
        )
        instants = {"sent_ns": reply.sent_ns, "headers_ns": reply.headers_ns, "done_ns": reply.done_ns}
        if is_stream:
            answer = stream.read()
            if reply.outcome is not Outcome.OK and answer.outcome is not Outcome.ERROR_EVENT:
                # What arrived before the failure stays; how it ended is what the transport saw.
                answer = replace(answer, outcome=reply.outcome, detail=reply.detail)
        elif reply.outcome is Outcome.OK:
            answer = self._plain(reply)
        else:
            answer = Answer(reply.outcome, reply.detail)
        return replace(answer, status=reply.status, **instants)

    def _plain(self, reply: Reply) -> Answer:
        try:
            piece = self.dialect.read_answer(json.loads(reply.body))
        except (Malformed, ValueError) as error:
            return Answer(Outcome.MALFORMED, str(error)[:_DETAIL_CHARACTERS])
        outcome, detail = judge([piece], is_complete=True)
        instants = (reply.done_ns,) if piece.carries_output else ()
        return replace(
            _joined([piece]),
            outcome=outcome,
            detail=detail,
            first_event_ns=reply.done_ns,
            output_ns=instants,
        )

    # --------------------------------------------------------------------------------------- everything else

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
    ) -> Reply:
        """Send bytes as they are, for what no dialect would send. Never raises for what the engine does."""
        return await self._send("POST", path, body, timeout_seconds=timeout_seconds, headers=headers)

    async def get(self, path: str, *, timeout_seconds: float = 10.0) -> Reply:
        """Fetch a path. Never raises for what the engine does."""
        return await self._send("GET", path, None, timeout_seconds=timeout_seconds)

    async def get_json(self, path: str, *, timeout_seconds: float = 10.0) -> Any:
        """Fetch a JSON document. Raises EndpointError."""
        return _json(await self.get(path, timeout_seconds=timeout_seconds))

    async def call(self, request: Request, *, timeout_seconds: float = 30.0) -> Any:
        """Send a request that answers with a JSON document. Raises EndpointError."""
        method = "GET" if request.body is None else "POST"
        return _json(await self._send(method, request.path, _encoded(request), timeout_seconds=timeout_seconds))

    async def is_healthy(self) -> bool:
        """Whether the health route answers 200. Health alone is not readiness."""
        return (await self.get(self.dialect.health_path)).outcome is Outcome.OK

    async def models(self) -> list[ServedModel]:
        """Return what the engine says it serves. Raises EndpointError, Malformed."""
        return self.dialect.read_models(await self.get_json(self.dialect.models_path))

    async def metrics(self) -> dict[str, float]:
        """Return the engine's metrics by name. Raises EndpointError, Malformed."""
        reply = await self.get(self.dialect.metrics_path)
        if reply.outcome is not Outcome.OK:
            raise EndpointError(reply.outcome, reply.detail)
        return parse_metrics(reply.body.decode("utf-8", errors="replace"))

    async def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids as a prompt gets them. Raises EndpointError, Malformed."""
        return self.dialect.read_tokens(await self.call(self.dialect.tokenize(text)), text)

    async def render_prompt(
        self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None
    ) -> str:
        """Return the text that the engine's template makes of a conversation. Raises EndpointError, Malformed."""
        return self.dialect.read_prompt(await self.call(self.dialect.render(messages, template_arguments)))

    async def render_prompt_ids(
        self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the token ids that a chat request with these messages would be given.

        Raises EndpointError, Malformed.
        """
        return await self.tokenize(await self.render_prompt(messages, template_arguments))

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        stream: Stream | None = None,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        content = {} if body is None else {"Content-Type": "application/json"}
        reply = Reply(Outcome.OK, sent_ns=time.perf_counter_ns())
        received = bytearray()
        try:
            async with self._client.request(
                method,
                self.base_url + path,
                data=body,
                headers={**content, **(headers or {})},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as response:
                reply = replace(
                    reply,
                    status=response.status,
                    headers=dict(response.headers),
                    headers_ns=time.perf_counter_ns(),
                    outcome=_status_outcome(response.status),
                )
                is_stream = stream is not None and reply.outcome is Outcome.OK
                async for chunk in response.content.iter_any():
                    if is_stream and stream is not None:
                        stream.feed(time.perf_counter_ns(), chunk)
                        if stream.is_done:
                            break
                    else:
                        received += chunk
            if reply.outcome is not Outcome.OK:
                reply = replace(reply, detail=_error_detail(reply.status, bytes(received)))
        except (aiohttp.ClientConnectorError, aiohttp.ClientConnectorDNSError) as error:
            reply = replace(reply, outcome=Outcome.CONNECT, detail=str(error))
        except (TimeoutError, asyncio.TimeoutError):
            reply = replace(reply, outcome=Outcome.TIMEOUT, detail=f"no end after {timeout_seconds:g} s")
        except NotUtf8 as error:
            reply = replace(reply, outcome=Outcome.MALFORMED, detail=str(error))
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            reply = replace(reply, outcome=Outcome.TRUNCATED, detail=f"the connection was cut: {error}")
        except aiohttp.ClientError as error:
            reply = replace(reply, outcome=Outcome.MALFORMED, detail=f"not HTTP: {error}")
        return replace(reply, body=bytes(received), done_ns=time.perf_counter_ns())


def _encoded(request: Request) -> bytes | None:
    return None if request.body is None else json.dumps(request.body).encode()


def _json(reply: Reply) -> Any:
    if reply.outcome is not Outcome.OK:
        raise EndpointError(reply.outcome, reply.detail)
    try:
        return json.loads(reply.body)
    except ValueError as error:
        raise EndpointError(Outcome.MALFORMED, f"not JSON: {error}") from None
