"""Checks of declared features against what the engine serves with this model and these arguments.

Source: `ModelConfig._get_default_runner_type` of vLLM 0.32, which pools for classes without a head and for what
Sentence Transformers wrote, and generates otherwise, and `_get_preferred_task` of 0.9 before it; max_logprobs of the
same; launcher/src/main.rs of TGI for --disable-grammar-support; sglang/srt/constrained for --grammar-backend none.
"""

from collections.abc import Iterator
from typing import Final

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from schemas.bundle import Feature

_GENERATING: Final = (Feature.CHAT, Feature.COMPLETIONS, Feature.TOOLS)
_BY_GRAMMAR: Final = (Feature.JSON_SCHEMA, Feature.TOOLS)
_POOLED: Final = frozenset({"embed", "embedding", "classify", "score", "reward"})


def check(c: Composition) -> Iterator[Flaw]:
    """Check the declared features."""
    match c.engine:
        case "vllm":
            yield from _runner(c)
            yield from _logprobs(c)
        case "sglang":
            if c.declared.arguments.get("--grammar-backend") == "none":
                yield from _lacking(c, (Feature.JSON_SCHEMA,), "--grammar-backend", "none")
        case "tgi":
            if c.declared.arguments.has("--disable-grammar-support"):
                yield from _lacking(c, _BY_GRAMMAR, "--disable-grammar-support", "true")


def _runner(c: Composition) -> Iterator[Flaw]:
    arguments, shape = c.declared.arguments, c.model.shape
    runner, task = arguments.get("--runner"), arguments.get("--task")
    is_told = runner not in (None, "auto") or task not in (None, "auto")
    pools = runner == "pooling" or task in _POOLED
    if is_told and pools:
        name = "--task" if task in _POOLED else "--runner"
        yield from _lacking(c, _GENERATING, name, str(arguments.get(name)))
        return
    by_itself = not is_told and (not shape.is_generator or c.model.has("modules.json"))
    if c.declared.has(Feature.EMBEDDINGS) and c.model.config and shape.architecture and not by_itself:
        yield flaw(
            "feature-not-served",
            f"The bundle declares embeddings, and vllm generates with {shape.architecture}: it has no embeddings then.",
            pointer="/serving/features",
            found={"feature": "embeddings", "runner": runner or task or "auto"},
            expected={"argument": "--runner pooling"},
            advice="Add --runner pooling, or do not declare embeddings.",
        )


def _logprobs(c: Composition) -> Iterator[Flaw]:
    if c.declared.arguments.get("--max-logprobs") == "0":
        yield from _lacking(c, (Feature.LOGPROBS,), "--max-logprobs", "0")


def _lacking(c: Composition, features: tuple[Feature, ...], name: str, value: str) -> Iterator[Flaw]:
    wanted = sorted(one.value for one in features if c.declared.has(one))
    if not wanted:
        return
    yield flaw(
        "feature-not-served",
        f"The bundle declares {', '.join(wanted)}, which {name} takes away.",
        pointer="/serving/features",
        found={"features": wanted, name: value},
        expected=f"no {name}",
    )
