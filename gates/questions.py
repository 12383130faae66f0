"""Asks an engine the prompts of a golden suite, one at a time, and keeps exactly what it answered."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gates.answers import Answer, Outcome
from gates.dialects.base import Capability, Dialect, Malformed, Request, Token
from gates.divergence import first_difference
from gates.endpoint import Endpoint, EndpointError
from gates.errors import InstrumentError
from gates.gate import GateContext, Records, clip
from schemas.reference import Reference
from schemas.suite import GoldenSuite, Prompt

REQUEST_SECONDS = 300.0
"""After so long an answer of at most 4,096 tokens is no longer waited for."""
_WINDOW = 5
_NEEDED = {
    Capability.RENDER: "the token ids of a conversation",
    Capability.TOKEN_IDS: "those of its answer",
    Capability.LOGPROBS: "log-probabilities",
}
# Whose fault it is when there is no answer. What cannot be rendered or tokenized in the form that the dialect
# promises may be the dialect's fault; an answer in another form than the reference got is the candidate's, such as
# log-probabilities of null, which llama.cpp writes for weights that are not numbers [C19].
_FAULTS_OF_THE_ENGINE = frozenset({Outcome.HTTP_4XX, Outcome.HTTP_5XX, Outcome.TRUNCATED, Outcome.ERROR_EVENT})
_FAULTS_OF_AN_ANSWER = _FAULTS_OF_THE_ENGINE | {Outcome.MALFORMED}


def measure(context: GateContext) -> Records:
    """Ask every prompt of the suite once; none where the engine does not tell what is compared, which is said instead.

    Raises:
        InstrumentError: there is no suite or no engine to ask.
    """
    if not isinstance(context.suite, GoldenSuite):
        raise InstrumentError("The golden suite is not at hand; push it and run the gate again.")
    if context.endpoint is None:
        raise InstrumentError("There is no engine to ask; boot the bundle first.")
    if lacks := untold(context.endpoint.dialect):
        return {"prompts": [], "untold": lacks}
    asked = ask_all(context.endpoint, context.suite, context.reference, context.progress)
    return {"prompts": asyncio.run(asked)}


def untold(dialect: Dialect) -> str | None:
    """Return what an engine does not tell, without which answers cannot be compared token by token; None if it does."""
    lacks = [what for capability, what in _NEEDED.items() if capability not in dialect.capabilities]
    return f"{dialect.name} does not tell {', nor '.join(lacks)}" if lacks else None


async def ask_all(
    endpoint: Endpoint, suite: GoldenSuite, reference: Reference | None, progress: Callable[[str], None]
) -> list[Records]:
    """Return one record a prompt, in the suite's order.

    Greedy and with the prompt cache off, and one at a time, since engines add in another order when they answer
    several at once. The request names no other sampling value: a default that changes greedy answers, such as a
    repetition penalty, is part of what callers get.
    """
    known = {recording.prompt: recording.prompt_ids for recording in (reference.recordings if reference else [])}
    records = []
    async with endpoint:
        for place, prompt in enumerate(suite.prompts, start=1):
            progress(f"golden prompt {place} of {len(suite.prompts)}: {prompt.id}")
            records.append(await _ask(endpoint, prompt, suite.top_k, known.get(prompt.id)))
    return records


async def _ask(endpoint: Endpoint, prompt: Prompt, top: int, expected_ids: Sequence[int] | None) -> Records:
    record: Records = {"prompt": prompt.id, "problem": None, "rendered": None, "prompt_ids": [], "texts": {}}
    messages = [message.model_dump(mode="json") for message in prompt.messages]
    try:
        rendered, prompt_ids = await endpoint.rendered(messages)
        record |= {"rendered": clip(rendered, 20_000), "prompt_ids": prompt_ids}
    except (EndpointError, Malformed) as error:
        outcome = error.outcome if isinstance(error, EndpointError) else Outcome.MALFORMED
        return record | {"problem": _problem(outcome, f"the prompt cannot be rendered ({error})")}
    if expected_ids is not None and list(expected_ids) != record["prompt_ids"]:
        # An answer to another prompt says nothing, so none is asked for.
        return record | {"texts": await _texts(endpoint, record["prompt_ids"], expected_ids)}
    request = greedy(endpoint, messages, max_tokens=prompt.max_tokens, top=top)
    answer = await endpoint.generate(request, timeout_seconds=REQUEST_SECONDS)
    return record | _read(replace(answer, tokens=await endpoint.with_texts(answer.tokens)))


def greedy(endpoint: Endpoint, messages: Sequence[dict[str, Any]], *, max_tokens: int, top: int | None) -> Request:
    """Build a plain chat request that names temperature 0 and no other sampling value, with the prompt cache off."""
    return endpoint.dialect.greedy(endpoint.model, messages, max_tokens=max_tokens, top_logprobs=top)


def _read(answer: Answer) -> Records:
    # A finished answer without text is an answer here: the reference may have been silent too.
    if answer.outcome not in {Outcome.OK, Outcome.EMPTY}:
        return {"problem": _problem(answer.outcome, answer.detail, _FAULTS_OF_AN_ANSWER)}
    if answer.usage is None:
        return {"problem": _problem(Outcome.MALFORMED, "the answer has no usage", _FAULTS_OF_AN_ANSWER)}
    return {
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "text": answer.text,
        "output": [_token(token) for token in answer.tokens if token.id is not None],
    }


def _token(token: Token) -> Records:
    top = [{"id": one.id, "text": one.text, "logprob": one.logprob} for one in token.top if one.id is not None]
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "top": top}


def _problem(outcome: Outcome, detail: str, of_the_engine: frozenset[Outcome] = _FAULTS_OF_THE_ENGINE) -> Records:
    side = "engine" if outcome in of_the_engine else "instrument"
    return {"of": side, "outcome": outcome.value, "detail": clip(detail, 1000)}


async def _texts(endpoint: Endpoint, ids: Sequence[int], expected_ids: Sequence[int]) -> dict[str, str]:
    """Return the texts of the tokens around the first difference, for people."""
    position = first_difference(ids, expected_ids) or 0
    window = slice(max(0, position - _WINDOW), position + _WINDOW)
    texts = {}
    for token in sorted({*ids[window], *expected_ids[window]}):
        try:
            texts[str(token)] = await endpoint.detokenize([token])
        except (EndpointError, Malformed):
            texts[str(token)] = "(unknown to this tokenizer)"
    return texts
