"""Checks of launch arguments that are sound alone and not together.

Source: `verify_max_model_len` of vllm/config/scheduler.py and `_verify_args` of vllm/config/speculative.py, both of
0.32.0; router/src/main.rs of TGI, which refuses an input that leaves no token for an answer.
"""

from collections.abc import Iterator

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw

_BATCHED, _SEQUENCES, _CONFIG = "--max-num-batched-tokens", "--max-num-seqs", "--speculative-config"
_INPUT, _TOTAL = ("--max-input-tokens", "--max-input-length"), "--max-total-tokens"
_COUNTED = ("ngram", "draft_model")
"""Methods of vLLM that have no number of tokens of their own."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the launch arguments of the engine."""
    if c.engine == "vllm":
        yield from _batched(c)
        yield from _drafted(c)
    if c.engine == "tgi":
        yield from _answerless(c)


def _batched(c: Composition) -> Iterator[Flaw]:
    arguments = c.declared.arguments
    batched, sequences = arguments.number(_BATCHED), arguments.number(_SEQUENCES)
    if batched is None:
        return
    if sequences is not None and batched < sequences:
        said = f"{_BATCHED} is {batched}, which is less than {_SEQUENCES} ({sequences}); vllm refuses that."
        yield _wrong(said, _BATCHED, batched, sequences)
    length = arguments.number("--max-model-len") or c.model.shape.context
    if arguments.has("--no-enable-chunked-prefill") and length is not None and batched < length:
        said = f"{_BATCHED} is {batched}, and without chunked prefill it must be {length}, as long as the context."
        yield _wrong(said, _BATCHED, batched, length)


def _drafted(c: Composition) -> Iterator[Flaw]:
    told = c.declared.arguments.json(_CONFIG) or {}
    least, most = told.get("prompt_lookup_min"), told.get("prompt_lookup_max")
    if type(least) is int and type(most) is int and least > most:
        said = f"{_CONFIG} has prompt_lookup_min {least}, which is above prompt_lookup_max ({most}); vllm refuses that."
        yield _wrong(said, _CONFIG, most, least)
    count, method = told.get("num_speculative_tokens"), told.get("method")
    if type(count) is int and count < 1:
        yield _wrong(f"{_CONFIG} drafts {count} tokens; vllm refuses that.", _CONFIG, count, 1)
    elif count is None and method in _COUNTED:
        said = f"{_CONFIG} names the method {method} and no num_speculative_tokens; vllm refuses that."
        yield _wrong(said, _CONFIG, sorted(told), 1)


def _answerless(c: Composition) -> Iterator[Flaw]:
    asked, total = c.declared.arguments.number(*_INPUT), c.declared.arguments.number(_TOTAL)
    if asked is not None and total is not None and asked >= total:
        said = f"{_INPUT[0]} is {asked}, and with {_TOTAL} {total} no token is left for an answer; tgi refuses that."
        yield flaw("argument-value", said, pointer=_INPUT[0], found=asked, expected={"below": total})


def _wrong(said: str, pointer: str, found: object, least: int) -> Flaw:
    return flaw("argument-value", said, pointer=pointer, found=found, expected={"at_least": least})
