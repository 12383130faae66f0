"""Sends the compatibility gate's probes and malformed requests, and keeps what came back as it came."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gates import adapters, wire
from gates.answers import Outcome
from gates.dialects.base import Malformed
from gates.endpoint import Endpoint, EndpointError, Reply
from gates.errors import InstrumentError
from gates.gate import GateContext, Records
from gates.malformed import Case, End, cases
from gates.questions import greedy
from schemas.bundle import Feature
from schemas.policy import CompatibilityRule

MAX_TOKENS = 16
SENTINEL_TOKENS = 2
LOGPROBS_TOP = 3
PROBE_SECONDS = 60.0
MAX_BODY_CHARACTERS = 1_000_000
_MESSAGES = ({"role": "user", "content": "Count from one to five in words."},)
_SENTINEL = ({"role": "user", "content": "ping"},)
_PROMPT = "one\ntwo\nthree\n"
_IDLE_READINGS = 3
_IDLE_SECONDS = 0.02
_HEAD_LIMIT_BYTES = 1 << 20


def measure(context: GateContext) -> Records:
    """Probe the booted engine.

    Raises:
        InstrumentError: there is no engine to ask, or it cannot be reached although its process lives.
    """
    if context.endpoint is None or not isinstance(context.rule, CompatibilityRule):
        raise InstrumentError("There is no engine to ask; boot the bundle first.")
    return asyncio.run(_measure(context, context.endpoint, float(context.rule.answer_seconds)))


async def _measure(context: GateContext, endpoint: Endpoint, answer_seconds: float) -> Records:
    async with endpoint:
        health = await endpoint.get(endpoint.dialect.health_path)
        if health.outcome is Outcome.CONNECT and context.process_id() is not None:
            raise InstrumentError(f"The engine at {endpoint.base_url} cannot be reached ({health.detail}).")
        start = await _start(context, endpoint, health)
        context.progress("compatibility: wire format")
        probes, stops = await _probe(context, endpoint)
        context.progress("compatibility: adapters")
        asked = await adapters.ask(context.bundle, endpoint, _exchange)
        baseline = [await _sentinel(endpoint, answer_seconds) for _ in range(2)]
        done = await _misuse(context, endpoint, start["context_tokens"] or 0, answer_seconds)
    records = {"start": start, "probes": probes, "stops": stops, "baseline": baseline, "cases": done}
    return records | ({"adapters": asked} if asked else {})


async def _start(context: GateContext, endpoint: Endpoint, health: Reply) -> Records:
    try:
        models = await endpoint.models()
    except (EndpointError, Malformed):
        models = []
    name = context.bundle.serving.served_name
    served = next((model.context_tokens for model in models if model.id == name), None)
    if served is None and context.engine is not None:
        served = context.engine.context_tokens or None
    return {
        "health": health.status,
        "models": [model.id for model in models],
        "context_tokens": served,
        "ready_ms": context.ready_ms,
    }


async def _probe(context: GateContext, endpoint: Endpoint) -> tuple[dict[str, Records], dict[str, str | None]]:
    features = context.bundle.serving.features
    probes: dict[str, Records] = {}
    stops: dict[str, str | None] = {"stop": None, "stop-stream": None}

    async def chat(name: str, messages: Sequence[dict[str, Any]] = _MESSAGES, **changes: object) -> None:
        request = greedy(endpoint, messages, max_tokens=MAX_TOKENS, top=None)
        body = {key: value for key, value in {**(request.body or {}), **changes}.items() if value is not None}
        probes[name] = await _exchange(endpoint, request.path, json.dumps(body).encode())

    await chat("chat")
    await chat("chat-one-token", max_tokens=1)
    text = wire.text_of(probes["chat"]["body"], is_chat=True) or ""
    if len(text) > 1:
        stops["stop"] = text[1:3]
        await chat("stop", stop=[stops["stop"]])
    if Feature.STREAMING in features:
        await chat("chat-stream", stream=True)
        await chat("chat-stream-usage", stream=True, stream_options={"include_usage": True})
        pieces = wire.read_stream(probes["chat-stream"]["body"], is_chat=True).texts
        if len(pieces) > 1 and (across := pieces[0][-1] + pieces[1][0]) in text:
            stops["stop-stream"] = across
            await chat("stop-stream", stream=True, stop=[across])
    if Feature.LOGPROBS in features:
        await chat("logprobs", logprobs=True, top_logprobs=LOGPROBS_TOP)
    if Feature.SYSTEM_ROLE in features:
        await chat("system-role", [{"role": "system", "content": "Answer briefly."}, *_MESSAGES])
    if Feature.COMPLETIONS in features:
        for name, is_stream in (("completion", False), ("completion-stream", True)):
            if not is_stream or Feature.STREAMING in features:
                probes[name] = await _complete(endpoint, is_stream=is_stream)
    return probes, stops


async def _complete(endpoint: Endpoint, *, is_stream: bool) -> Records:
    dialect = endpoint.dialect
    body: dict[str, object] = {"model": endpoint.model, "prompt": _PROMPT, "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0, "stream": is_stream, **dialect.cache_fields(use_cache=False)}
    body = dialect.generation_fields(body, is_chat=False)
    return await _exchange(endpoint, dialect.completions_path, json.dumps(body).encode())


async def _misuse(context: GateContext, endpoint: Endpoint, served_tokens: int, answer_seconds: float) -> list[Records]:
    bundle = context.bundle
    todo = cases(
        bundle.serving.served_name,
        context_tokens=max(served_tokens, bundle.runtime.context_tokens),
        has_completions=Feature.COMPLETIONS in bundle.serving.features,
    )
    process_id = context.process_id()
    done: list[Records] = []
    for place, case in enumerate(todo, start=1):
        context.progress(f"compatibility: malformed request {place} of {len(todo)}: {case.name}")
        exchange = await _send(endpoint, case, answer_seconds)
        is_idle = await _wait_until_idle(endpoint, answer_seconds, is_sure=case.end is not End.READ)
        health = await endpoint.get(endpoint.dialect.health_path, timeout_seconds=answer_seconds)
        sentinel = await _sentinel(endpoint, answer_seconds)
        now = context.process_id()
        record = {"case": case.name, "exchange": exchange, "is_idle": is_idle, "health": health.status}
        done.append(record | {"sentinel": sentinel, "process_id": now, "is_same_process": now == process_id})
        if now is None or now != process_id:
            break  # nobody is left to ask
    return done


async def _sentinel(endpoint: Endpoint, timeout_seconds: float) -> Records:
    """Ask an ordinary question; the state is all of the answer that must never change."""
    request = greedy(endpoint, _SENTINEL, max_tokens=SENTINEL_TOKENS, top=None)
    answer = await endpoint.generate(request, timeout_seconds=timeout_seconds)
    record: Records = {
        "outcome": answer.outcome.value,
        "detail": answer.detail,
        "seconds": round((answer.done_ns - answer.sent_ns) / 1e9, 6),
        "state": None,
    }
    if answer.outcome not in {Outcome.OK, Outcome.EMPTY} or answer.usage is None:
        return record
    usage = answer.usage
    state = [answer.finish_reason, answer.text, answer.reasoning, usage.prompt_tokens, usage.completion_tokens]
    return record | {"state": state}


async def _wait_until_idle(endpoint: Endpoint, limit_seconds: float, *, is_sure: bool) -> bool | None:
    """Wait until no request runs or waits. None when the engine does not tell.

    A request between its socket and its slot is in no count yet, so that after a hang-up one reading proves little.
    """
    names = endpoint.dialect.metrics
    if names.running is None or names.waiting is None:
        return None
    deadline = time.monotonic() + limit_seconds
    idle = 0
    while idle < (_IDLE_READINGS if is_sure else 1):
        try:
            metrics = await endpoint.metrics()
            busy = metrics[names.running] + metrics[names.waiting]
        except (EndpointError, Malformed, KeyError):
            return None
        idle = idle + 1 if busy == 0 else 0
        if busy and time.monotonic() > deadline:
            return False
        if busy or is_sure:
            await asyncio.sleep(_IDLE_SECONDS)
    return True


async def _exchange(
    endpoint: Endpoint,
    path: str,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = PROBE_SECONDS,
) -> Records:
    sent_at = time.time()
    reply = await endpoint.post(path, body, headers=headers, timeout_seconds=timeout_seconds)
    is_answer = reply.outcome in {Outcome.OK, Outcome.HTTP_4XX, Outcome.HTTP_5XX} or reply.status > 0
    is_whole = is_answer and reply.outcome not in {Outcome.TIMEOUT, Outcome.TRUNCATED}
    headers_seen = {name.lower(): value for name, value in reply.headers.items()}
    return {
        "problem": None if is_whole else reply.outcome.value,
        "status": reply.status,
        "content_type": headers_seen.get("content-type", ""),
        "seconds": round((reply.done_ns - reply.sent_ns) / 1e9, 6),
        "sent_at": round(sent_at, 3),
        "ended_at": round(time.time(), 3),
        **_text(reply.body),
    }


def _text(body: bytes) -> Records:
    try:
        return {"body": body.decode("utf-8")[:MAX_BODY_CHARACTERS], "is_utf8": True}
    except UnicodeDecodeError:
        return {"body": body.decode("utf-8", "replace")[:MAX_BODY_CHARACTERS], "is_utf8": False}


async def _send(endpoint: Endpoint, case: Case, answer_seconds: float) -> Records:
    dialect = endpoint.dialect
    paths = {"chat": dialect.chat_path, "completions": dialect.completions_path, "unknown": "/v1/no-such-route"}
    if case.end is End.READ:
        headers = {"Content-Type": case.content_type}
        return await _exchange(endpoint, paths[case.route], case.body, headers=headers, timeout_seconds=answer_seconds)
    return await _hang_up(endpoint, paths[case.route], case, answer_seconds)


async def _hang_up(endpoint: Endpoint, path: str, case: Case, limit_seconds: float) -> Records:
    """Send a request over a bare connection, and drop the connection where the case says."""
    url = urlsplit(endpoint.base_url)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    head = (
        f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: {case.content_type}\r\n"
        f"Content-Length: {len(case.body)}\r\nConnection: close\r\n\r\n"
    )
    body = case.body[: len(case.body) // 2] if case.end is End.HALF_SENT else case.body
    sent_at, started = time.time(), time.perf_counter()
    problem, received = None, b""
    try:
        async with asyncio.timeout(limit_seconds):
            reader, writer = await asyncio.open_connection(host, port, ssl=url.scheme == "https" or None)
            try:
                writer.write(head.encode() + body)
                await writer.drain()
                if case.end is End.FIRST_EVENT:
                    received = await _first_event(reader)
            finally:
                writer.transport.abort()
    except TimeoutError:
        problem = Outcome.TIMEOUT.value
    except OSError:
        problem = Outcome.CONNECT.value
    seconds = time.perf_counter() - started
    head_bytes, _, rest = received.partition(b"\r\n\r\n")
    status = int(head_bytes.split()[1]) if head_bytes.startswith(b"HTTP/1.") else 0
    if case.end is End.FIRST_EVENT and problem is None and status == 0:
        problem = Outcome.TRUNCATED.value
    return {
        "problem": problem,
        "status": status,
        "content_type": "",
        "seconds": round(seconds, 6),
        "sent_at": round(sent_at, 3),
        "ended_at": round(time.time(), 3),
        **_text(_unchunked(rest)),
    }


async def _first_event(reader: asyncio.StreamReader) -> bytes:
    """Read until one event of a stream is whole, or until the answer ends."""
    received = b""
    while len(received) < _HEAD_LIMIT_BYTES:
        chunk = await reader.read(65536)
        received += chunk
        head, _, rest = received.partition(b"\r\n\r\n")
        if not chunk or (b"text/event-stream" in head.lower() and b"\n\n" in rest.replace(b"\r\n", b"")):
            break
    return received


def _unchunked(rest: bytes) -> bytes:
    """Return the content of a body that may be in chunks, as far as it has come."""
    content, remaining = b"", rest
    while True:
        size, separator, remaining = remaining.partition(b"\r\n")
        try:
            length = int(size.split(b";")[0], 16)
        except ValueError:
            return content or rest
        if not separator or length == 0:
            return content
        content += remaining[:length]
        remaining = remaining[length + 2 :]
