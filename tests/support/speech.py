"""What engines that are not installed here say over HTTP, as their sources document it: one script an engine.

Each answers a conversation with "Hi" in two pieces: 23 prompt tokens and 3 of the answer, as CHAIN does. `flaw` makes
it say something that has to be noticed.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gates.dialects import releases
from tests.support.folder_bundles import VERSIONS
from tests.support.requests_in_order import misuse
from tests.support.scripted_http import Asked, answer

PIECES = ("H", "i")
PROMPT_TOKENS = 23
LOGPROBS = [("H", -0.25, "J", -1.5), ("i", -0.5, "a", -2.0)]
DONE = "data: [DONE]\n\n"


def event(body: object, name: str = "") -> str:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(body)}\n\n"


class Said(NamedTuple):
    """One answer: its pieces, how it ended, and tokens of the answer, of which the end of the turn is one."""

    pieces: tuple[str, ...]
    finish: str | None
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """What an engine counts of it."""
        total = PROMPT_TOKENS + self.tokens
        return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": self.tokens, "total_tokens": total}


@dataclass(frozen=True)
class Speech:
    """One engine's script. `served` is the model's name, `flaw` what is wrong with what it says; none if empty.

    `accepts` are names of `gates.malformed.cases` that it takes for requests in order; `answers_as` is the name under
    which it answers, where that is another one.
    """

    engine: str
    error: Callable[[int, str], bytes]
    stream_error: str
    health: str = "/health"
    served: str = "chain"
    flaw: str = ""
    done: str = DONE
    refuses: Callable[[Mapping[str, Any], bool], str | None] = lambda _body, _is_chat: None
    refused_status: int = 400
    extras: Mapping[str, object] | None = None
    tokens: str | None = None
    model_entry: Mapping[str, object] | None = None
    names_model: bool = True
    finish: str = "stop"
    usage_with_finish: bool = False
    accepts: frozenset[str] = frozenset()
    answers_as: str | None = None

    def __call__(self, asked: Asked) -> bytes:
        """Answer one request."""
        if asked.method == "GET":
            return self._get(asked.path)
        try:
            body = json.loads(asked.body)
        except (ValueError, RecursionError):
            return self.error(400, "the body is no JSON")
        if asked.path in {"/v1/chat/completions", "/v1/completions"}:
            if asked.headers.get("content-type") != "application/json" or not isinstance(body, dict):
                return self.error(self.refused_status, "the body is no object of JSON")
            return self._generate(body, is_chat="chat" in asked.path)
        if asked.path == self.tokens:
            return _json([] if self.flaw == "no_tokens" else self._tokens(body))
        return self.error(404, f"no route {asked.path}")

    # ----------------------------------------------------------------------------------------- other routes

    def _get(self, path: str) -> bytes:
        if path == self.health:
            if self.flaw == "unhealthy" or path != "/v1/models":
                return answer(503 if self.flaw == "unhealthy" else 200)
            return self._models()
        if path == "/v1/models":
            return self._models()
        if path in {"/metrics", "/prometheus/metrics"}:
            return answer(200, self._page().encode(), kind="text/plain; version=0.0.4")
        if self.extras is not None and path in self.extras:
            return _json({} if self.flaw == "no_facts" else self.extras[path])
        return self.error(404, f"no route {path}")

    def _models(self) -> bytes:
        entry = {"id": "another" if self.flaw == "wrong_model" else self.served, "object": "model"}
        data = [{**entry, **(self.model_entry or {})}] if self.names_model else []
        return _json({"object": "list"} if self.flaw == "no_models" else {"object": "list", "data": data})

    def _page(self) -> str:
        if self.flaw == "broken_metrics":
            return "this is no page of metrics\n"
        page = releases.recorded()[self.engine]["pages"]
        version = VERSIONS[self.engine]
        names: list[str] = next((one["names"] for one in page if one["release"] == version), [])
        return "".join(f'# TYPE {name} gauge\n{name}{{model_name="{self.served}"}} 0.0\n' for name in names)

    def _tokens(self, body: Mapping[str, Any]) -> object:
        said = body.get("prompt", body.get("inputs", ""))
        ids = list(range(len(said)))
        if self.engine == "tgi":
            return [{"id": one, "text": said[one], "start": one, "stop": one + 1} for one in ids]
        return {"tokens": ids, "count": len(ids), "max_model_len": 4096}

    # ---------------------------------------------------------------------------------------- generations

    def _generate(self, body: Mapping[str, Any], *, is_chat: bool) -> bytes:
        if (why := misuse(body, self.served, is_chat=is_chat, accepts=self.accepts)) is not None:
            return self.error(self.refused_status, why)
        if (why := self.refuses(body, is_chat)) is not None:
            return self.error(self.refused_status, why)
        if self.flaw == "refuses":
            return self.error(self.refused_status, "the request is not to its liking")
        if self.flaw == "html":
            return answer(200, b"<html>busy</html>", kind="text/html")
        if self.flaw == "server_error":
            return self.error(500, "the engine died")
        said = self._said(body)
        if body.get("stream"):
            wants_usage = self.usage_with_finish or (body.get("stream_options") or {}).get("include_usage", False)
            text = "".join(self._events(said, is_chat=is_chat, wants_usage=wants_usage))
            sent = text[: len(text) // 2] if self.flaw == "cut" else text
            return answer(200, sent.encode(), kind="text/event-stream", length=len(text))
        return _json(self._plain(said, is_chat=is_chat, with_logprobs=bool(body.get("logprobs"))))

    def _said(self, body: Mapping[str, Any]) -> Said:
        """Return the answer to a request: cut at its limit, or before what is to stop it."""
        limit = body.get("max_tokens") or len(PIECES) + 1
        pieces = () if self.flaw == "empty" else PIECES[:limit]
        finish = {"no_finish": None, "abort": "abort", "strange_finish": "tired"}.get(self.flaw, self.finish)
        whole = "".join(pieces)
        stops = [told] if isinstance(told := body.get("stop") or [], str) else told
        stop = next((one for one in stops if one in whole), None)
        if stop is not None:
            text = whole[: whole.index(stop)]
            return Said((text,) if text else (), finish, len(pieces))
        return Said(pieces, finish, len(PIECES) + 1) if limit > len(PIECES) else Said(pieces, "length", limit)

    def _choice(self, *, is_chat: bool, holder: str, text: str | None, finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {holder: {"role": "assistant", "content": text}} if is_chat else {"text": text or ""}
        return {"index": 0, **said, "finish_reason": finish}

    def _envelope(self, kind: str) -> dict[str, Any]:
        model = self.answers_as or self.served
        return {"id": "said-1", "object": kind, "created": int(time.time()), "model": model}

    def _plain(self, said: Said, *, is_chat: bool, with_logprobs: bool) -> dict[str, Any]:
        choice = self._choice(is_chat=is_chat, holder="message", text="".join(said.pieces), finish=said.finish)
        if with_logprobs:
            choice["logprobs"] = {"content": [_logprob(*row) for row in LOGPROBS]} if is_chat else _columns()
        choices = [choice, {**choice, "index": 1}] if self.flaw == "two_choices" else [choice]
        usage = {} if self.flaw == "no_usage" else {"usage": said.usage}
        return {**self._envelope("chat.completion" if is_chat else "text_completion"), "choices": choices, **usage}

    def _events(self, said: Said, *, is_chat: bool, wants_usage: bool) -> Iterator[str]:
        envelope = self._envelope("chat.completion.chunk" if is_chat else "text_completion")

        def chunk(text: str | None, finish: str | None = None, usage: object = None) -> str:
            if self.engine == "tgi" and not is_chat:
                finish = {None: "", "stop": "eos_token"}.get(finish, finish)
            choice = self._choice(is_chat=is_chat, holder="delta", text=text, finish=finish)
            return event({**envelope, "choices": [choice], **({"usage": usage} if usage else {})})

        wants_usage = wants_usage and self.flaw != "no_usage"
        if is_chat:
            yield chunk("")
        for place, piece in enumerate(said.pieces):
            if self.flaw == "error_event" and place == 1:
                yield self.stream_error + self.done
                return
            yield "data: {half\n\n" if self.flaw == "broken_event" else chunk(piece)
        yield chunk(None, said.finish, said.usage if wants_usage and self.usage_with_finish else None)
        if self.flaw == "two_finishes":
            yield chunk(None, self.finish)
        if self.flaw == "late_output":
            yield chunk("!")
        if wants_usage and not self.usage_with_finish:
            yield event({**envelope, "choices": [], "usage": said.usage})
        if self.flaw != "no_done":
            yield self.done


def _json(body: object, status: int = 200) -> bytes:
    return answer(status, json.dumps(body).encode())


def _logprob(text: str, logprob: float, other: str, other_logprob: float) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob}, {"token": other, "logprob": other_logprob}]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": top}


def _columns() -> dict[str, Any]:
    return {
        "text_offset": [0, 1],
        "tokens": [row[0] for row in LOGPROBS],
        "token_logprobs": [row[1] for row in LOGPROBS],
        "top_logprobs": [{row[0]: row[1], row[2]: row[3]} for row in LOGPROBS],
    }


# ------------------------------------------------------------------------------------------------- the engines


def _flat_error(status: int, text: str) -> bytes:
    return _json({"object": "error", "message": text, "type": "BadRequest", "param": None, "code": status}, status)


def _refused_by_sglang(body: Mapping[str, Any], is_chat: bool) -> str | None:
    if body.get("top_k", -1) == 0:
        return "top_k must be -1 (disable), or at least 1, got 0."
    return "max_tokens must be positive" if body.get("max_tokens", 1) <= 0 else None


def _error(status: int, text: str) -> bytes:
    return _json({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}, status)


def _refused_elsewhere(body: Mapping[str, Any], is_chat: bool) -> str | None:
    known = {"model", "max_tokens", "stream", "stream_options", "temperature", "top_p", "seed", "logprobs", "stop", "n"}
    known |= {"messages", "top_logprobs", "response_format", "tools", "tool_choice"} if is_chat else {"prompt"}
    unknown = set(body) - known
    return f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}" if unknown else None


def _refused_by_tgi(body: Mapping[str, Any], is_chat: bool) -> str | None:
    if not 0 < body.get("top_p", 0.5) < 1:
        return "Input validation error: `top_p` must be > 0.0 and < 1.0"
    if is_chat and "temperature" not in body:
        return "a conversation without temperature would be sampled"
    if not is_chat and body.get("temperature", 1) <= 0:
        return "Input validation error: `temperature` must be strictly positive"
    return None


def _refused_by_transformers(body: Mapping[str, Any], is_chat: bool) -> str | None:
    known = {"model", "max_tokens", "stream", "temperature", "top_p", "seed", "generation_config", "stop"}
    unknown = set(body) - known - ({"messages"} if is_chat else {"prompt"})
    if unknown:
        return f"Unexpected fields in the request: {unknown}"
    told = json.loads(body.get("generation_config") or "{}")
    return (
        None if set(told) <= {"top_k", "min_p", "repetition_penalty", "do_sample"} else f"no GenerationConfig: {told}"
    )


def _refused_by_trtllm(body: Mapping[str, Any], is_chat: bool) -> str | None:
    known = {"model", "max_tokens", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed"}
    known |= {"repetition_penalty", "logprobs", "stop", "n"}
    known |= {"messages", "top_logprobs", "response_format", "tools", "tool_choice"} if is_chat else {"prompt"}
    unknown = sorted(set(body) - known)
    return f"Extra inputs are not permitted: {', '.join(unknown)}" if unknown else None


SPEECHES: dict[str, Speech] = {
    "external": Speech(
        engine="external",
        error=_error,
        stream_error=event({"error": {"message": "it broke", "type": "server_error"}}),
        refuses=_refused_elsewhere,
        health="/v1/models",
        extras={"/relay": {"endpoint": "https://models.example/", "server": "gateway"}},
    ),
    "tgi": Speech(
        engine="tgi",
        health=releases.health("tgi").path,
        error=lambda status, text: _json({"error": text, "error_type": "validation"}, status),
        stream_error=event({"error": {"message": "it broke", "http_status_code": 424}}),
        refuses=_refused_by_tgi,
        refused_status=422,
        accepts=frozenset({"model-unknown"}),
        tokens="/tokenize",
        extras={
            "/info": {
                "version": VERSIONS["tgi"],
                "model_id": "chain",
                "model_sha": None,
                "max_total_tokens": 4096,
                "max_concurrent_requests": 8,
            }
        },
    ),
    "transformers": Speech(
        engine="transformers",
        health=releases.health("transformers").path,
        error=lambda status, text: _json({"detail": text}, status),
        stream_error=event({"error": "it broke"}),
        done="",
        refuses=_refused_by_transformers,
        refused_status=422,
        usage_with_finish=True,
    ),
    "trtllm": Speech(
        engine="trtllm",
        health=releases.health("trtllm").path,
        error=_flat_error,
        stream_error=event({"error": {"object": "error", "message": "it broke", "type": "InternalServerError"}}),
        refuses=_refused_by_trtllm,
        extras={"/version": {"version": VERSIONS["trtllm"]}},
    ),
    "sglang": Speech(
        engine="sglang",
        health=releases.health("sglang").path,
        error=_flat_error,
        stream_error=event({"error": {"object": "error", "message": "it broke", "type": "InternalServerError"}}),
        refuses=_refused_by_sglang,
        tokens="/tokenize",
        model_entry={"owned_by": "sglang", "root": "chain", "max_model_len": 4096},
        extras={
            "/server_info": {
                "version": VERSIONS["sglang"],
                "model_path": "/model",
                "served_model_name": "chain",
                "context_length": 4096,
                "tp_size": 1,
                "quantization": None,
                "internal_states": [{}],
            }
        },
    ),
}
"""Engine → what it says when nothing is wrong."""


def flawed(engine: str, flaw: str) -> Speech:
    """Return an engine that says something wrong."""
    return replace(SPEECHES[engine], flaw=flaw)
