"""Sends what the structured gate asks, and keeps what came back as it came."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gates.answers import Answer, Outcome
from gates.contracts import Contract, ContractError
from gates.dialects.base import Capability, Malformed, Sampling
from gates.endpoint import Endpoint, EndpointError
from gates.errors import InstrumentError
from gates.gate import GateContext, Records
from gates.keyword_probes import MAX_TOKENS, PROBES, WHITE_SPACE, KeywordProbe, pushes
from schemas.policy import StructuredRule
from schemas.suite import StructuredItem, StructuredSuite

TTFT_REPEATS = 3
TTFT_TOKENS = 4
LARGER = 4
"""A cut answer is asked for once more, with so many times the tokens."""
MAX_TEXT = 100_000
_NAME = "answer"
_PROBE_MESSAGES = ({"role": "user", "content": "ping"},)


def measure(context: GateContext) -> Records:
    """Probe the keywords, the cost of each schema, and ask every item as often as the suite says.

    Raises:
        InstrumentError: there is no suite or no engine, a schema cannot be judged by, or the engine does not add to the
            scores of tokens, or not as much, although the suite asks for it.
    """
    suite, rule = context.suite, context.rule
    if not isinstance(suite, StructuredSuite) or not isinstance(rule, StructuredRule):
        raise InstrumentError("The structured suite is not at hand; push it and run the gate again.")
    if context.endpoint is None:
        raise InstrumentError("There is no engine to ask; boot the bundle first.")
    can_push = Capability.LOGIT_BIAS in context.endpoint.dialect.capabilities
    if not can_push and any(item.logit_bias for item in suite.items):
        raise InstrumentError("The suite gives logit_bias, which this engine does not take; use another suite.")
    limit = context.endpoint.dialect.bias_limit
    given = [abs(one.bias) for item in suite.items for one in item.logit_bias or ()]
    if limit is not None and given and max(given) > limit:
        raise InstrumentError(
            f"The suite gives a logit_bias of {max(given)}, and this engine cuts it at {limit:g}; use another suite."
        )
    try:
        used = {keyword for item in suite.items for keyword in Contract(item.json_schema).keywords}
    except ContractError as error:
        raise InstrumentError(f"The suite's schema {error}; correct it and push it again.") from None
    return asyncio.run(_Session(context, context.endpoint, float(rule.answer_seconds)).measure(suite, used, can_push))


class _Session:
    def __init__(self, context: GateContext, endpoint: Endpoint, answer_seconds: float) -> None:
        self.progress = context.progress
        self.endpoint = endpoint
        self.answer_seconds = answer_seconds

    async def measure(self, suite: StructuredSuite, used: set[str], can_push: bool) -> Records:
        async with self.endpoint:
            probes = await self._probes(sorted(used & PROBES.keys())) if can_push else []
            items = []
            for place, item in enumerate(suite.items, start=1):
                self.progress(f"structured {place} of {len(suite.items)}: {item.id}")
                items.append(await self._item(item, suite.repeats))
        return {"probes": probes, "items": items}

    # ------------------------------------------------------------------------------------------- keywords

    async def _probes(self, keywords: Sequence[str]) -> list[Records]:
        probes: list[Records] = []
        for place, keyword in enumerate(keywords, start=1):
            self.progress(f"keyword {place} of {len(keywords)}: {keyword}")
            probe = PROBES[keyword]
            try:
                bias = await self._bias(probe)
            except (EndpointError, Malformed) as error:
                probes.append({"keyword": keyword, "problem": str(error)[:500], "answer": None})
                continue
            fields = self._schema_fields(dict(probe.schema)) | self.endpoint.dialect.bias_fields(bias)
            answer = await self._ask(_PROBE_MESSAGES, fields, max_tokens=MAX_TOKENS)
            probes.append({"keyword": keyword, "problem": None, "answer": answer})
        return probes

    async def _bias(self, probe: KeywordProbe) -> dict[int, float]:
        """Return what to add to which token. Raises EndpointError, Malformed."""
        lead = await self._tokens("")
        push, step, avoid = pushes(self.endpoint.dialect.bias_limit)
        bias = {}
        for rank, character in enumerate(probe.characters()):
            bias[await self._token(character, lead)] = push - step * rank
        for character in WHITE_SPACE:
            bias[await self._token(character, lead)] = avoid
        return bias

    async def _token(self, character: str, lead: Sequence[int]) -> int:
        # A text's tokens may begin with one that stands for the beginning of every text.
        tokens = (await self._tokens(character))[len(lead) :]
        if len(tokens) != 1:
            raise Malformed(f"{character!r} is {len(tokens)} tokens here, so that it cannot be pushed")
        return tokens[0]

    async def _tokens(self, text: str) -> list[int]:
        return await self.endpoint.tokenize(text)

    # ---------------------------------------------------------------------------------------------- items

    async def _item(self, item: StructuredItem, repeats: int) -> Records:
        messages = [message.model_dump(mode="json") for message in item.messages]
        bias = self.endpoint.dialect.bias_fields({one.token: float(one.bias) for one in item.logit_bias or ()})
        fields = self._schema_fields(Contract(item.json_schema).schema) | bias
        # In turns, so that a machine that becomes busier does so for both.
        schema_ttft, plain_ttft = [await self._ttft(messages, fields)], []
        for _ in range(TTFT_REPEATS):
            plain_ttft.append(await self._ttft(messages, bias))
            schema_ttft.append(await self._ttft(messages, fields))
        record: Records = {"item": item.id, "plain_ttft_ms": plain_ttft, "schema_ttft_ms": schema_ttft}
        record["plain"] = await self._ask(messages, bias, max_tokens=item.max_tokens)
        record["cut"] = await self._ask(messages, fields, max_tokens=1)
        answers = []
        for number in range(repeats):
            answers.append(await self._answer(item, messages, fields, number))
            if (number + 1) % 20 == 0:
                self.progress(f"structured {item.id}: {number + 1} of {repeats} answers")
        return record | {"answers": answers}

    async def _answer(
        self, item: StructuredItem, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, object], number: int
    ) -> Records:
        # Repeating a greedy answer would count one observation many times.
        sampling = Sampling() if number == 0 else Sampling(temperature=1.0, seed=number)
        answer = await self._ask(messages, fields, max_tokens=item.max_tokens, sampling=sampling)
        again = None
        if answer["finish_reason"] == "length":
            again = await self._ask(messages, fields, max_tokens=item.max_tokens * LARGER, sampling=sampling)
        return {"number": number, "answer": answer, "again": again}

    async def _ttft(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, object]) -> float | None:
        """Return ms to the first output, or to the end of an answer of white space, which streams do not show."""
        answer = await self.endpoint.chat(
            list(messages),
            max_tokens=TTFT_TOKENS,
            stream=True,
            extra=fields,
            timeout_seconds=self.answer_seconds,
        )
        if answer.outcome not in {Outcome.OK, Outcome.EMPTY}:
            return None
        return round(answer.ttft_ms if answer.ttft_ms is not None else (answer.done_ns - answer.sent_ns) / 1e6, 3)

    async def _ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, object],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
    ) -> Records:
        # The tokens' texts tell what the engine strips from a finished answer: white space and code fences.
        answer = await self.endpoint.chat(
            list(messages),
            max_tokens=max_tokens,
            stream=False,
            sampling=sampling or Sampling(),
            top_logprobs=1 if Capability.LOGPROBS in self.endpoint.dialect.capabilities else None,
            extra=fields,
            timeout_seconds=self.answer_seconds,
        )
        return _record(answer)

    def _schema_fields(self, schema: Mapping[str, object]) -> dict[str, object]:
        return self.endpoint.dialect.schema_fields(_NAME, schema)


def _record(answer: Answer) -> Records:
    text, raw = answer.text, "".join(token.text for token in answer.tokens)
    return {
        "outcome": answer.outcome.value,
        "detail": _storable(answer.detail)[:500],
        "finish_reason": answer.finish_reason,
        "text": _storable(text)[:MAX_TEXT],
        "raw": _storable(raw)[:MAX_TEXT] if raw and raw != text else None,
        "is_whole": len(text) <= MAX_TEXT,
        "tokens": answer.usage.completion_tokens if answer.usage else None,
        "seconds": round((answer.done_ns - answer.sent_ns) / 1e9, 3),
    }


def _storable(text: str) -> str:
    # Half a character is written as JSON escapes it, and is read so again.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
