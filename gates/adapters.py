"""The adapters of a bundle, asked under their own names: part of the compatibility gate.

An engine may list an adapter and answer for it with the base model: because no module of it matches, because its
strength is zero, or because a name that is not known falls through. Nothing in such an answer is wrong by itself, so
each adapter is held against the base: the same questions, greedy, and what the engine computed for each token.

Source: incidents C79, C80, C86 (an adapter without effect) and C89 (a name that falls through).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from gates import wire
from gates.endpoint import Endpoint
from gates.gate import Records, finding
from schemas.bundle import Bundle, Feature
from schemas.result import Finding, Severity

QUESTIONS = (
    "Count from one to five in words.",
    "Write one sentence about the sea.",
    "Reply with a JSON object that has the key answer.",
)
"""More than one: an adapter may have learned nothing about the first."""
MAX_TOKENS = 16
TOP = 3
LEAST_EFFECT_NAT = 1e-4
"""A smaller difference of every log-probability is none: an engine may round alike requests so far apart."""
_MOST_NAT = 1e6
_UNKNOWN_NAME = "model-unknown"

Ask = Callable[[Endpoint, str, bytes], Any]
"""Sends a body to a path and returns, once awaited, the recorded exchange."""


async def ask(bundle: Bundle, endpoint: Endpoint, exchange: Ask) -> dict[str, list[Records]]:
    """Return the exchanges of the base, under its served name, and of each adapter; none where there is no adapter.

    One without an answer is the last: a bundle may have hundreds of adapters, and an engine that hangs hangs for each.
    """
    if not bundle.adapters:
        return {}
    more: dict[str, object] = {}
    if Feature.LOGPROBS in bundle.serving.features:
        more = {"logprobs": True, "top_logprobs": TOP}
    asked: dict[str, list[Records]] = {}
    for name in (bundle.serving.served_name, *(one.name for one in bundle.adapters)):
        asked[name] = []
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            request = endpoint.dialect.greedy(name, messages, max_tokens=MAX_TOKENS, top_logprobs=None)
            body = {key: value for key, value in {**(request.body or {}), **more}.items() if value is not None}
            asked[name].append(await exchange(endpoint, request.path, json.dumps(body).encode()))
            if asked[name][-1].get("problem") is not None:
                return asked
    return asked


def lacking(bundle: Bundle, asked: Mapping[str, list[Records]]) -> list[str]:
    """Return the names that were not asked all questions, of a bundle that has adapters; none after one left open."""
    if not bundle.adapters:
        return []
    names = (bundle.serving.served_name, *(one.name for one in bundle.adapters))
    if any(one["problem"] is not None for name in names for one in asked.get(name, ())):
        return []
    return [name for name in names if len(asked.get(name, ())) != len(QUESTIONS)]


def judge(bundle: Bundle, asked: Mapping[str, list[Records]], unknown: Records | None) -> Iterator[Finding]:
    """Yield what is wrong with answers under the names of adapters.

    `asked` is what `ask` returned, and lacks nothing. `unknown` is the exchange of a request for a model that nobody
    serves, if there was one.
    """
    if not bundle.adapters:
        return
    base = bundle.serving.served_name
    wrong = list(_wire(base, asked.get(base, [])))
    yield from wrong
    for adapter in bundle.adapters:
        answers = asked.get(adapter.name, [])
        found = list(_wire(adapter.name, answers))
        yield from found
        if adapter.name == base:
            message = f"The adapter {base} has the name that the base is served under: one of them is never reached."
            yield finding("adapter-name-taken", message, pointer=f"model {base}", advice="Give it a name of its own.")
        elif answers and not found and not wrong:
            yield from _effect(bundle, adapter.name, asked)
    if unknown is not None and unknown["status"] == 200:
        message = "A model that nobody serves is answered for: a mistyped adapter's name gets another model's answer."
        advice = "Refuse unknown names at the gateway, or serve adapters on an engine that does."
        found_as = f"200 {unknown['body'][:500]}"
        yield finding(
            "model-name-unchecked", message, pointer=_UNKNOWN_NAME, found=found_as, expected="4xx", advice=advice
        )


def _wire(name: str, exchanges: list[Records]) -> Iterator[Finding]:
    """Yield what is wrong with one model's answers, each kind once: another model's name is among it."""
    seen = set()
    for exchange in exchanges:
        for one in wire.plain(f"model {name}", exchange, model=name, max_tokens=MAX_TOKENS, is_chat=True):
            if one.code not in seen:
                seen.add(one.code)
                yield one


def _effect(bundle: Bundle, name: str, asked: Mapping[str, list[Records]]) -> Iterator[Finding]:
    pairs = list(zip(asked[bundle.serving.served_name], asked[name], strict=True))
    texts = [[_said(one["body"]) for one in pair] for pair in pairs]
    if any(left != right for left, right in texts):
        return
    values = [[_logprobs(one["body"]) for one in pair] for pair in pairs]
    pointer, of = f"model {name}", f"{len(pairs)} questions"
    if any(one is None for pair in values for one in pair):
        message = f"Adapter {name} gave the texts of the base to all of {of}; that it has an effect is not shown."
        advice = "Declare logprobs, so that values can be compared, or show by hand that it answers otherwise."
        yield finding("adapter-effect-unproved", message, severity=Severity.WARN, pointer=pointer, advice=advice)
        return
    most = max((_apart(left or [], right or []) for left, right in values), default=0.0)
    if most <= LEAST_EFFECT_NAT:
        message = f"Adapter {name} answers all of {of} as the base does, value by value: it has no effect."
        advice = "Check its target modules against the names that this engine gives them, its scale and its matrices."
        expected = f"more than {LEAST_EFFECT_NAT:g} nat"
        found = f"log-probabilities at most {most:g} nat apart"
        yield finding("adapter-no-effect", message, pointer=pointer, found=found, expected=expected, advice=advice)


def _said(body: str) -> tuple[str | None, str | None]:
    """Return the text of an answer, and the reasoning before it: so few tokens may hold no other text."""
    message = wire.first_choice(wire.read_json(body)).get("message")
    return wire.text_of(body, is_chat=True), wire.reasoning_of(message) if isinstance(message, dict) else None


def _logprobs(body: str) -> list[list[float]] | None:
    """Return the log-probabilities of each token and of its rivals; None where there are none."""
    told = wire.first_choice(wire.read_json(body)).get("logprobs")
    entries = told.get("content") if isinstance(told, Mapping) else None
    if not isinstance(entries, list) or not entries:
        return None
    values = []
    for entry in entries:
        rivals = entry.get("top_logprobs") if isinstance(entry, dict) else None
        row = [_number(one) for one in (entry, *rivals)] if isinstance(rivals, list) else [None]
        values.append([one for one in row if one is not None])
        if len(values[-1]) != len(row):
            return None
    return values


def _number(entry: Any) -> float | None:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # What is no number, or none of this size, is no log-probability: nothing is held against it.
    return float(value) if -_MOST_NAT <= value <= _MOST_NAT else None


def _apart(left: list[list[float]], right: list[list[float]]) -> float:
    """Return by how much two answers' values differ at most, in nat; infinite where they are not of the same form."""
    if [len(row) for row in left] != [len(row) for row in right]:
        return float("inf")
    pairs = zip(chain.from_iterable(left), chain.from_iterable(right), strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)
