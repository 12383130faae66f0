"""Talks to one engine over HTTP and says exactly what came back, and when.

Built for measuring: aiohttp without a limit on connections, one connection a request unless asked otherwise, no
retries, no redirects, and the time of every event taken before its content is read. An answer counts as `ok` only
when it is whole.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import aiohttp

from gates.answers import CUT, DETAIL_CHARACTERS, Answer, Outcome, Stream, read_plain
from gates.dialects.base import (
    GREEDY,
    Capability,
    Dialect,
    Malformed,
    Message,
    Request,
    Sampling,
    ServedModel,
    Token,
    error_message,
    parse_metrics,
)
from gates.sse import NotUtf8

_READ_BUFFER_BYTES = 1 << 20


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


def _status_outcome(status: int) -> Outcome:
    if status == 200:
        return Outcome.OK
    if status >= 500:
        return Outcome.HTTP_5XX
    return Outcome.HTTP_4XX if status >= 400 else Outcome.MALFORMED


def _error_detail(status: int, body: bytes) -> str:
    text = body.decode("utf-8", errors="replace")
    with suppress(ValueError):  # then the body itself is the message
        text = error_message(json.loads(text)) or text
    return f"{status}: {text}"[:DETAIL_CHARACTERS]


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
        self.headers = dict(headers or {})
        self._reuse_connections = reuse_connections
        self._session: aiohttp.ClientSession | None = None
        self._texts: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not self._reuse_connections),
            headers=self.headers,
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
        if is_stream:
            answer = stream.read()
            if reply.outcome is not Outcome.OK and answer.outcome is not Outcome.ERROR_EVENT:
                # What arrived before the failure stays; how it ended is what the transport saw.
                answer = replace(answer, outcome=reply.outcome, detail=reply.detail)
        elif reply.outcome is Outcome.OK:
            answer = read_plain(self.dialect, reply.body, reply.done_ns)
        else:
            answer = Answer(reply.outcome, reply.detail)
        return replace(
            answer,
            status=reply.status,
            sent_ns=reply.sent_ns,
            headers_ns=reply.headers_ns,
            done_ns=reply.done_ns,
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

    async def facts(self) -> dict[str, str]:
        """Return what the engine says of itself, if anything. Raises EndpointError, Malformed."""
        if self.dialect.facts_path is None:
            return {}
        reply = await self.get(self.dialect.facts_path)
        if reply.status == 404 and self.dialect.older_facts_path is not None:
            reply = await self.get(self.dialect.older_facts_path)
        return self.dialect.read_facts(_json(reply))

    async def metrics(self) -> dict[str, float]:
        """Return the engine's metrics by name. Raises EndpointError, Malformed."""
        reply = await self.get(self.dialect.metrics_path)
        if reply.outcome is not Outcome.OK:
            raise EndpointError(reply.outcome, reply.detail)
        return parse_metrics(reply.body.decode("utf-8", errors="replace"))

    async def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids as a prompt gets them. Raises EndpointError, Malformed."""
        return self.dialect.read_tokens(await self.call(self.dialect.tokenize(text)), text)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of some token ids. Raises EndpointError, Malformed."""
        return self.dialect.read_text(await self.call(self.dialect.detokenize(tokens)))

    async def render_prompt(
        self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None
    ) -> str:
        """Return the text that the engine's template makes of a conversation. Raises EndpointError, Malformed."""
        return (await self.rendered(messages, template_arguments))[0]

    async def render_prompt_ids(
        self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the token ids that a chat request with these messages would be given.

        Raises EndpointError, Malformed.
        """
        return (await self.rendered(messages, template_arguments))[1]

    async def rendered(
        self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None
    ) -> tuple[str, list[int]]:
        """Return the text that the engine's template makes of a conversation, and its token ids.

        Raises EndpointError, Malformed.
        """
        told = await self.call(self.dialect.render(messages, template_arguments))
        if self.dialect.renders_ids:
            tokens = self.dialect.read_tokens(told, "a prompt")
            return await self.detokenize(tokens), tokens
        text = self.dialect.read_prompt(told)
        return text, await self.tokenize(text)

    async def with_texts(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """Return tokens with the texts that the engine left out of its answer, where it can be asked for them."""
        return tuple([await self._with_text(token) for token in tokens])

    async def _with_text(self, token: Token) -> Token:
        top = tuple([replace(one, text=one.text or await self._text_of(one.id)) for one in token.top])
        return replace(token, text=token.text or await self._text_of(token.id), top=top)

    async def _text_of(self, token: int | None) -> str:
        if token is None or Capability.TOKENIZE not in self.dialect.capabilities:
            return ""
        if token not in self._texts:
            try:
                self._texts[token] = await self.detokenize([token])
            except (EndpointError, Malformed):
                self._texts[token] = ""
        return self._texts[token]

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
        except aiohttp.ClientConnectorError as error:
            reply = replace(reply, outcome=Outcome.CONNECT, detail=str(error))
        except TimeoutError:
            reply = replace(reply, outcome=Outcome.TIMEOUT, detail=f"no end after {timeout_seconds:g} s")
        except NotUtf8 as error:
            reply = replace(reply, outcome=Outcome.MALFORMED, detail=str(error))
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            reply = replace(reply, outcome=Outcome.TRUNCATED, detail=f"{CUT}: {error}")
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
