"""What every dialect is made of: requests in an engine's own spelling, and what its answers mean. Asks nobody.

Every request names every sampling field, since engines take defaults from their files, and engines ignore fields
that they do not know: an answer of 200 never means that a field was understood.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from schemas.common import sha256_digest

# An engine writes the least float, or this number, for a token of probability zero; no real one comes near it.
_IMPOSSIBLE = -9999.0
_TOKEN_ID = "token_id:"  # noqa: S105 - a token of text

Message = Mapping[str, object]


class Malformed(ValueError):
    """An engine's answer does not have the form that its dialect promises."""


class Capability(StrEnum):
    """What can be asked of an engine of this kind."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    STREAMING = "streaming"
    LOGPROBS = "logprobs"
    TOKEN_IDS = "token_ids"  # noqa: S105 - a token of text
    TOKENIZE = "tokenize"
    RENDER = "render"
    JSON_SCHEMA = "json_schema"
    TOOLS = "tools"
    CACHE_CONTROL = "cache_control"
    METRICS = "metrics"
    CONTEXT = "context"
    LOGIT_BIAS = "logit_bias"
    PROMPT_LOGPROBS = "prompt_logprobs"
    LORA_AT_RUN_TIME = "lora_at_run_time"
    """Adapters can be loaded into and taken from an engine that runs."""
    DRAIN = "drain"
    """After SIGTERM the engine takes nothing new and lets running requests end."""
    MODEL_LIST = "model_list"
    """The model list has the name that is served. Of an engine without, only its answers say it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The default is greedy, with nothing else left to an engine's files.

    `temperature` 0 takes the likeliest token. `top_k` 0, `top_p` 1, `min_p` 0 and `repeat_penalty` 1 change
    nothing. `seed` makes a sampled answer repeatable.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 1


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """One HTTP request: POST of `body` as JSON, or GET when there is none."""

    path: str
    body: dict[str, object] | None = None


@dataclass(frozen=True)
class Alternative:
    """A token that could have come; `logprob` in nats. `id` is None where the engine does not tell it."""

    id: int | None
    text: str
    logprob: float


@dataclass(frozen=True)
class Token:
    """A token that came, with the likeliest tokens at its place, best first, itself included when it is one."""

    id: int | None
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens as the engine counts them; `cached_tokens` of the prompt, None when it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Piece:
    """What one event of a stream, or one whole plain answer, says about one choice.

    `index` is None for an event without choices, such as the closing one with the usage.
    """

    index: int | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    tokens: tuple[Token, ...] = ()
    usage: Usage | None = None
    model: str | None = None
    error: str | None = None

    @property
    def carries_output(self) -> bool:
        """Whether the model produced something here: text, reasoning or part of a tool call."""
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class ServedModel:
    """One entry of the model list; `context_tokens` is what one request gets, None when the engine is silent."""

    id: str
    context_tokens: int | None = None


@dataclass(frozen=True)
class MetricNames:
    """Names on the metrics page; None for what an engine does not count.

    `progress` moves while a request runs; the token counters may only at its end.
    """

    running: str | None = None
    waiting: str | None = None
    progress: str | None = None
    prompt_tokens: str | None = None
    cached_tokens: str | None = None
    generated_tokens: str | None = None


@dataclass(frozen=True)
class Dialect:
    """How to speak to one kind of engine, as a table and what follows from it.

    `sampling_fields` maps fields of `Sampling` to the engine's spelling, and `every_candidate` is what it takes for
    the `top_k` that keeps all. A prompt's cache is left alone by `cache_field` false, or where there is no such field
    by a `salt_field` that no request had before. `logprob_fields` go with a request for log-probabilities. An engine
    that `renders_ids` tells the token ids of a conversation, and another one its text. `finish_words` maps its own
    words for how an answer ended to those of OpenAI, or to None when they mean that it has not. `has_done` is False
    for an engine whose streams end without [DONE]: their end is then the connection's. `bias_limit` is the most that an
    engine adds to or takes from a token's score, which it makes of anything beyond without a word; None for any.
    `older_facts_path` is what `facts_path` was called in versions that do not know it.
    """

    name: str
    verified_with: str
    capabilities: frozenset[Capability]
    metrics: MetricNames
    sampling_fields: Mapping[str, str]
    reasoning_fields: tuple[str, ...]
    cache_field: str | None = None
    salt_field: str | None = None
    logprob_fields: Mapping[str, object] = field(default_factory=dict)
    health_path: str = "/health"
    models_path: str = "/v1/models"
    metrics_path: str = "/metrics"
    chat_path: str = "/v1/chat/completions"
    completions_path: str = "/v1/completions"
    render_path: str = "/apply-template"
    renders_ids: bool = False
    tokenize_path: str = "/tokenize"
    tokenize_field: str = "content"
    tokenize_flags: Mapping[str, bool] = field(default_factory=dict)
    detokenize_path: str = "/detokenize"
    detokenize_field: str = "content"
    context_pointer: tuple[str, ...] = ()
    facts_path: str | None = None
    older_facts_path: str | None = None
    facts_fields: tuple[str, ...] = ()
    every_candidate: int = 0
    render_field: str = "prompt"
    has_done: bool = True
    finish_words: Mapping[str, str | None] = field(default_factory=dict)
    bias_limit: float | None = None

    # -------------------------------------------------------------------------------------------- requests

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        stream: bool = False,
        sampling: Sampling = GREEDY,
        top_logprobs: int | None = None,
        use_cache: bool = False,
        template_arguments: Mapping[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Request:
        """Build a chat request with every sampling field named.

        Args:
            model: name in /v1/models.
            messages: the conversation.
            max_tokens: most tokens to generate, at least 1.
            stream: ask for events, with a closing one that carries the usage.
            sampling: how tokens are chosen.
            top_logprobs: ask for log-probabilities, with so many alternatives; None asks for none.
            use_cache: let the engine reuse the prompt's prefix from an earlier request.
            template_arguments: variables for the chat template.
            extra: further fields, such as tools, stop or response_format; they win over those made here.
        """
        body: dict[str, object] = {"model": model, "messages": list(messages)}
        body |= self._generation(max_tokens, stream=stream, sampling=sampling, use_cache=use_cache, is_chat=True)
        if top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": top_logprobs, **self.logprob_fields}
        if template_arguments is not None:
            body["chat_template_kwargs"] = dict(template_arguments)
        return Request(self.chat_path, body | dict(extra or {}))

    def greedy(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, top_logprobs: int | None = None
    ) -> Request:
        """Build a plain chat request that names temperature 0 and no other sampling value, with the prompt cache off.

        What else decides the answer are then the defaults that callers get.
        """
        request = self.chat(model, messages, max_tokens=max_tokens, stream=False, top_logprobs=top_logprobs)
        others = {spelling for name, spelling in self.sampling_fields.items() if name not in {"temperature", "seed"}}
        body = {key: value for key, value in (request.body or {}).items() if key not in others}
        return Request(request.path, body)

    def completion(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stream: bool = False,
        sampling: Sampling = GREEDY,
        top_logprobs: int | None = None,
        use_cache: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> Request:
        """Build a completion request from text or from token ids. Arguments as `chat`."""
        text = prompt if isinstance(prompt, str) else list(prompt)
        body: dict[str, object] = {"model": model, "prompt": text}
        body |= self._generation(max_tokens, stream=stream, sampling=sampling, use_cache=use_cache, is_chat=False)
        if top_logprobs is not None:
            body |= {"logprobs": top_logprobs, **self.logprob_fields}
        return Request(self.completions_path, body | dict(extra or {}))

    def _generation(
        self, max_tokens: int, *, stream: bool, sampling: Sampling, use_cache: bool, is_chat: bool
    ) -> dict[str, object]:
        body: dict[str, object] = {"max_tokens": max_tokens, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        body |= {spelling: self._spelled(sampling, name) for name, spelling in self.sampling_fields.items()}
        return self.generation_fields(body | self.cache_fields(use_cache=use_cache), is_chat=is_chat)

    def generation_fields(self, body: Mapping[str, object], *, is_chat: bool) -> dict[str, object]:
        """Return the fields of a generation as this kind of engine takes them, where that goes by their values."""
        del is_chat
        return dict(body)

    def cache_fields(self, *, use_cache: bool) -> dict[str, object]:
        """Return the fields that let a prompt's prefix be reused from an earlier request, or that keep it from that."""
        if self.cache_field is not None:
            return {self.cache_field: use_cache}
        return {} if use_cache or self.salt_field is None else {self.salt_field: secrets.token_hex(8)}

    def _spelled(self, sampling: Sampling, name: str) -> object:
        value = getattr(sampling, name)
        return self.every_candidate if name == "top_k" and value == 0 else value

    def schema_fields(self, name: str, schema: Mapping[str, object]) -> dict[str, object]:
        """Return the fields that ask for an answer that conforms to a JSON Schema."""
        wrapped = {"name": name, "schema": dict(schema), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": wrapped}}

    def bias_fields(self, bias: Mapping[int, float]) -> dict[str, object]:
        """Return the fields that add to the scores of tokens, by token id."""
        return {"logit_bias": {str(token): value for token, value in bias.items()}} if bias else {}

    def render(self, messages: Sequence[Message], template_arguments: Mapping[str, object] | None = None) -> Request:
        """Build the request that turns a conversation into the prompt's text or token ids, without generating."""
        body: dict[str, object] = {"messages": list(messages)}
        if template_arguments is not None:
            body["chat_template_kwargs"] = dict(template_arguments)
        return Request(self.render_path, body)

    def tokenize(self, text: str) -> Request:
        """Build the request for a text's token ids, as the engine makes them for a prompt: with BOS and markers."""
        return Request(self.tokenize_path, {self.tokenize_field: text, **self.tokenize_flags})

    def detokenize(self, tokens: Sequence[int]) -> Request:
        """Build the request for the text of some token ids."""
        return Request(self.detokenize_path, {"tokens": list(tokens)})

    # --------------------------------------------------------------------------------------------- answers

    def read_tokens(self, body: object, text: str) -> list[int]:
        """Read the token ids of `text`. Raises Malformed when there are none for a text that is not empty."""
        # A list is of tokens with their places in the text.
        tokens = [_mapping(one).get("id") for one in body] if isinstance(body, list) else _mapping(body).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Malformed("the answer has no list of token ids")
        if text and not tokens:
            raise Malformed("a text that is not empty was given no token")
        return tokens

    def read_text(self, body: object) -> str:
        """Read the text of token ids; an incomplete character is U+FFFD. Raises Malformed."""
        return _text(_mapping(body), self.detokenize_field)

    def read_prompt(self, body: object) -> str:
        """Read the rendered prompt."""
        prompt = _mapping(body).get(self.render_field)
        if not isinstance(prompt, str):
            raise Malformed("the answer has no rendered prompt")
        return prompt

    def read_models(self, body: object) -> list[ServedModel]:
        """Read the model list, with the context that one request gets where the engine tells it."""
        entries = _mapping(body).get("data")
        if not isinstance(entries, list):
            raise Malformed("the model list has no data")
        return [ServedModel(_text(_mapping(entry), "id"), self._context(entry)) for entry in entries]

    def _context(self, entry: object) -> int | None:
        value = entry
        for step in self.context_pointer:
            if not isinstance(value, Mapping):
                return None
            value = value.get(step)
        return value if self.context_pointer and type(value) is int else None

    def read_facts(self, body: object) -> dict[str, str]:
        """Read what the engine says of itself, beyond its models; long texts as their digest. Raises Malformed."""
        said = _mapping(body)
        if missing := [name for name in self.facts_fields if name not in said]:
            raise Malformed(f"it does not say {', '.join(missing)} of itself")
        values = {name: said[name] if isinstance(said[name], str) else repr(said[name]) for name in self.facts_fields}
        return {name: value if len(value) <= 200 else sha256_digest(value.encode()) for name, value in values.items()}

    def read_answer(self, body: object) -> Piece:
        """Read a plain answer. Raises Malformed."""
        return self._read(_mapping(body), "message")

    def read_event(self, body: object) -> Piece:
        """Read one event of a stream. Raises Malformed."""
        return self._read(_mapping(body), "delta")

    def _read(self, body: Mapping[str, Any], holder: str) -> Piece:
        if (error := body.get("error")) is not None or body.get("object") == "error":
            return Piece(error=error_message(body) or str(error))
        choices = body.get("choices")
        if not isinstance(choices, list):
            raise Malformed("neither choices nor an error")
        model, usage = body.get("model"), _read_usage(body.get("usage"))
        if not choices:
            return Piece(usage=usage, model=model)
        choice = _mapping(choices[0])
        if len(choices) > 1:
            raise Malformed(f"{len(choices)} choices, where one was asked for")
        said = _mapping(choice.get(holder) or {})
        reasoning = "".join(_string(said.get(name)) for name in self.reasoning_fields)
        return Piece(
            index=int(choice.get("index", 0)),
            content=_string(said.get("content")) + _string(choice.get("text")),
            reasoning=reasoning,
            tool_calls=tuple(_mapping(call) for call in said.get("tool_calls") or ()),
            finish_reason=self._finish(choice.get("finish_reason")),
            tokens=_read_logprobs(choice.get("logprobs")),
            usage=usage,
            model=model,
        )

    def _finish(self, said: object) -> str | None:
        if said is None:
            return None
        word = _string(said)
        return self.finish_words.get(word, word)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Malformed(f"an object was expected, not {type(value).__name__}")
    return value


def _string(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Malformed(f"text was expected, not {type(value).__name__}")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise Malformed(f"{name} is missing")
    return value


def _read_usage(body: object) -> Usage | None:
    if body is None:
        return None
    usage = _mapping(body)
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is not int or type(completion) is not int:
        raise Malformed("usage without counts")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Usage(prompt, completion, cached if type(cached) is int else None)


def _alternative(entry: Mapping[str, Any]) -> Alternative:
    logprob = entry.get("logprob")
    if not isinstance(logprob, int | float):
        raise Malformed("a token without log-probability")
    text, identity = _text(entry, "token"), entry.get("id")
    if type(identity) is int:
        return Alternative(identity, text, float(logprob))
    # Asked for ids, some engines write them in place of the text, which alone does not tell a token of bytes.
    number = text.removeprefix(_TOKEN_ID)
    if number != text and number.isdecimal():
        return Alternative(int(number), "", float(logprob))
    return Alternative(None, text, float(logprob))


def _read_logprobs(body: object) -> tuple[Token, ...]:
    if not isinstance(body, Mapping):
        return ()
    content = body.get("content") or list(_listed(body))
    tokens = []
    for entry in content:
        chosen = _alternative(_mapping(entry))
        top = [_alternative(_mapping(other)) for other in entry.get("top_logprobs") or ()]
        # Some put the token that came first, whatever its rank.
        likely = sorted((one for one in top if one.logprob > _IMPOSSIBLE), key=lambda one: -one.logprob)
        tokens.append(Token(chosen.id, chosen.text, chosen.logprob, tuple(likely)))
    return tuple(tokens)


def _listed(body: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Yield entries from the older form of completions: lists of tokens, of numbers, and of maps of alternatives."""
    tokens, numbers = body.get("tokens") or (), body.get("token_logprobs") or ()
    if len(tokens) != len(numbers):
        raise Malformed(f"{len(tokens)} tokens with {len(numbers)} log-probabilities")
    tops = body.get("top_logprobs") or [None] * len(tokens)
    for token, number, top in zip(tokens, numbers, tops, strict=False):
        others = [{"token": text, "logprob": value} for text, value in (top or {}).items()]
        yield {"token": token, "logprob": number, "top_logprobs": others}


def error_message(body: object) -> str | None:
    """Return what an error body says, in the forms that engines use; None when it says nothing."""
    if not isinstance(body, Mapping):
        return None
    error = body.get("error")
    said = [error.get("message")] if isinstance(error, Mapping) else [error]
    # Flat, as the OpenAI routes of vLLM and SGLang say it, or as FastAPI does by itself.
    said += [body.get("message") if body.get("object") == "error" else None, body.get("detail")]
    if isinstance(details := body.get("detail"), list):
        said += [one.get("msg") for one in details if isinstance(one, Mapping)]
    return next((text for text in said if isinstance(text, str) and text), None)


def parse_metrics(page: str) -> dict[str, float]:
    """Read a Prometheus text page: metric name → value, summed over its labels. Raises Malformed."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        # A time stamp may follow the value; a label's text may hold spaces, so look behind the braces.
        rest = line.rsplit("}", 1)[-1] if "{" in line else line[len(name) :]
        try:
            values[name] = values.get(name, 0.0) + float(rest.split()[0])
        except (IndexError, ValueError):
            raise Malformed(f"metrics line without a value: {line[:80]}") from None
    return values
