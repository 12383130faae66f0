"""Checks of sampling defaults: what the model asks for, and what the engine will do when a request says nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from schemas.result import Severity

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What leaves the model's own distribution alone. `top_k` 0, -1 and off are one thing."""
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "top_k": (-1, 2**31),
}


def check(c: Composition) -> Iterator[Flaw]:
    """Check generation_config.json against the engine."""
    told = c.model.object("generation_config.json")
    asked = model_defaults(told)
    yield from _range(c, told)
    if asked and c.model.gguf is None:
        yield from _ignored(c, asked)


def model_defaults(told: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling values of a generation config that change anything."""
    if told.get("do_sample") is False:
        return {}
    found = {name: told[name] for name in NEUTRAL if type(told.get(name)) in (int, float)}
    return {name: value for name, value in found.items() if not _is_neutral(name, value)}


def _is_neutral(name: str, value: float) -> bool:
    return value <= 0 if name == "top_k" else value == NEUTRAL[name]


def effective_defaults(c: Composition) -> dict[str, float] | None:
    """Return the sampling values that apply when a request names none; None when the engine's ways are not known."""
    rule = c.rules.get("sampling_defaults")
    if rule is None:
        return None
    defaults = dict(NEUTRAL)
    if rule == "all" and c.declared.arguments.get("--generation-config", "--sampling-defaults") not in {
        "vllm",
        "openai",
    }:
        defaults |= model_defaults(c.model.object("generation_config.json"))
    override = c.declared.arguments.json("--override-generation-config") or {}
    defaults |= {name: override[name] for name in NEUTRAL if type(override.get(name)) in (int, float)}
    return defaults


def _ignored(c: Composition, asked: Mapping[str, float]) -> Iterator[Flaw]:
    effective = effective_defaults(c)
    if effective is None:
        return
    override = c.declared.arguments.json("--override-generation-config") or {}
    differing = {name: value for name, value in asked.items() if effective[name] != value and name not in override}
    if not differing:
        return
    pairs = ", ".join(
        f"{name} {_shown(name, value)} vs {_shown(name, effective[name])}" for name, value in differing.items()
    )
    yield flaw(
        "engine-sampling-diff",
        f"{c.engine} does not apply these defaults of generation_config.json: {pairs}.",
        severity=Severity.WARN,
        file=c.model.path("generation_config.json"),
        found={name: _shown(name, effective[name]) for name in differing},
        expected={name: _shown(name, value) for name, value in differing.items()},
    )


def _shown(name: str, value: float) -> float | str:
    return "off" if name == "top_k" and value <= 0 else value


def _range(c: Composition, told: Mapping[str, Any]) -> Iterator[Flaw]:
    for name, (low, high) in _RANGES.items():
        value = told.get(name)
        if value is None:
            continue
        zero = name in {"top_p", "repetition_penalty"} and value == 0
        if type(value) not in (int, float) or not low <= value <= high or zero:
            yield flaw(
                "sampling-out-of-range",
                f"generation_config.json says {name} {value!r}, and it must be from {low} to {high}.",
                file=c.model.path("generation_config.json"),
                pointer=f"/{name}",
                found=value,
                expected={"from": low, "to": high},
            )
