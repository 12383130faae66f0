"""Checks of sampling defaults: what the model asks for, and what the engine will do when a request says nothing."""

import re
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
_OWN: Mapping[str, Mapping[str, float]] = {
    "llamacpp": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
"""Engines with defaults of their own, where neither bundle nor file names one: llama.cpp's `common_params_sampling`."""
GGUF_SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Value → its key below `general.sampling` of a GGUF header."""
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "top_k": (-1, 2**31),
    "max_new_tokens": (1, 2**31),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_WHOLE = frozenset({"top_k", "max_new_tokens"})
_OVERRIDE = "--override-generation-config"
_FILE = "generation_config.json"
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "temperature": ("--temp", "--temperature"),
    "top_p": ("--top-p",),
    "top_k": ("--top-k",),
    "min_p": ("--min-p",),
    "repetition_penalty": ("--repeat-penalty",),
}
"""Value → llama.cpp's arguments for it, which come before what a GGUF header says."""
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def check(c: Composition) -> Iterator[Flaw]:
    """Check generation_config.json against the engine."""
    told, file = _told(c)
    asked = asked_by(told)
    yield from _range(c, told, file)
    yield from _range(c, c.declared.arguments.json(_OVERRIDE) or {}, None)
    if c.pools:
        return
    yield from _limited(c, told, file)
    if c.model.gguf is None:
        yield from _ignored(c, asked, file)
    elif c.model.has(_FILE):
        # llama.cpp reads the header; what else the publisher says is lost, unless the conversion put it there.
        yield from _ignored(c, asked_by(c.model.object(_FILE)), c.model.path(_FILE))


def _limited(c: Composition, told: Mapping[str, Any], file: str) -> Iterator[Flaw]:
    """Find a number of tokens at which the engine ends each answer whose request names none.

    Source: `ModelConfig.get_diff_sampling_param` of vLLM 0.32, which makes max_new_tokens the default of max_tokens.
    """
    override = c.declared.arguments.json(_OVERRIDE) or {}
    most = told.get("max_new_tokens")
    applies = c.engine == "vllm" and c.rules.get("sampling_defaults") == "all"
    context = c.declared.context_tokens or c.model.shape.context
    is_none = type(most) is not int or most < 1 or (context is not None and most >= context)
    if not applies or is_none or "max_new_tokens" in override or c.model.gguf is not None:
        return
    if c.declared.arguments.get("--generation-config") not in (None, "auto"):
        return
    yield flaw(
        "answers-limited",
        f"{file} says max_new_tokens {most}, and {c.engine} ends answers there where a request names no number.",
        file=file,
        pointer="/max_new_tokens",
        found={"max_new_tokens": most},
        expected={"at_least": context},
    )


def _told(c: Composition) -> tuple[Mapping[str, Any], str]:
    """Return the generation config and the file that it stands in.

    A model without one has it in config.json, where both transformers and vLLM look then; a GGUF file has its own keys.
    """
    if c.model.gguf is not None:
        keys = {f"general.sampling.{key}": name for name, key in GGUF_SAMPLING.items()}
        told = c.model.gguf.metadata
        # A header holds single precision, of which seven digits are what was written.
        inside = {
            name: float(f"{told[key]:.7g}") if isinstance(told[key], float) else told[key]
            for key, name in keys.items()
            if key in told
        }
        return inside, c.model.path(next(iter(c.model.gguf_files)))
    if c.model.has(_FILE):
        return c.model.object(_FILE), c.model.path(_FILE)
    return {name: c.model.config[name] for name in (*NEUTRAL, "do_sample") if name in c.model.config}, c.model.path(
        "config.json"
    )


def asked_by(told: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling values that a generation config states; none where it samples nothing."""
    if told.get("do_sample") is False:
        return {}
    return {name: told[name] for name in NEUTRAL if type(told.get(name)) in (int, float)}


def of_arguments(c: Composition) -> dict[str, tuple[float, str]]:
    """Return the sampling values that launch arguments state, each with the argument's name."""
    arguments = c.declared.arguments
    override = arguments.json(_OVERRIDE) or {}
    found: dict[str, tuple[float, str]] = {
        name: (override[name], _OVERRIDE) for name in NEUTRAL if type(override.get(name)) in (int, float)
    }
    for name, flags in _FLAGS.items() if c.engine == "llamacpp" else ():
        text = arguments.get(*flags)
        if text is not None and _NUMBER.fullmatch(text):
            found[name] = (float(text), flags[0])
    return found


def effective_defaults(c: Composition) -> dict[str, float] | None:
    """Return the sampling values that apply when a request names none; None when the engine's ways are not known."""
    rule = c.rules.get("sampling_defaults")
    if rule is None:
        return None
    defaults, told = {**NEUTRAL, **_OWN.get(c.engine or "", {})}, _told(c)[0]
    asked = c.declared.arguments.get("--generation-config", "--sampling-defaults")
    if c.engine == "vllm" and rule == "stops" and asked is not None:
        rule = "all"  # before it was the default, it was asked for
    if rule == "sampled" and told.get("do_sample") is not True:
        defaults["temperature"] = 0.0  # without do_sample the likeliest token is taken, whatever else is said
    elif (rule in {"all", "sampled"} and asked not in {"vllm", "openai"}) or c.model.gguf is not None:
        defaults |= asked_by(told)
    return defaults | {name: value for name, (value, _) in of_arguments(c).items()}


def _ignored(c: Composition, asked: Mapping[str, float], file: str) -> Iterator[Flaw]:
    effective = effective_defaults(c)
    if effective is None:
        return
    # What changes nothing is no wish of its own, unless the engine would change it.
    plain, stated = {} if c.engine in _OWN else NEUTRAL, of_arguments(c)
    differing = {
        name: value
        for name, value in asked.items()
        if name not in stated and _shown(name, value) not in {_shown(name, effective[name]), plain.get(name)}
    }
    if not differing:
        return
    pairs = ", ".join(
        f"{name} {_shown(name, value)} vs {_shown(name, effective[name])}" for name, value in differing.items()
    )
    yield flaw(
        "engine-sampling-diff",
        f"{c.engine} does not apply these defaults of {file}: {pairs}.",
        severity=Severity.WARN,
        file=file,
        found={name: _shown(name, effective[name]) for name in differing},
        expected={name: _shown(name, value) for name, value in differing.items()},
    )


def _shown(name: str, value: float) -> float | str:
    return "off" if name == "top_k" and value <= 0 else value


def _range(c: Composition, told: Mapping[str, Any], file: str | None) -> Iterator[Flaw]:
    is_gguf = c.model.gguf is not None
    for name, (low, high) in _RANGES.items():
        value = told.get(name)
        if value is None:
            continue
        zero = name in {"top_p", "repetition_penalty"} and value == 0
        odd = name in _WHOLE and type(value) is float and not value.is_integer()
        if type(value) not in (int, float) or not low <= value <= high or zero or odd:
            yield flaw(
                "sampling-out-of-range",
                f"{file or _OVERRIDE} says {name} {value!r}, and it must be from {low} to {high}.",
                file=file,
                pointer=_OVERRIDE
                if file is None
                else f"general.sampling.{GGUF_SAMPLING[name]}"
                if is_gguf
                else f"/{name}",
                found=value,
                expected={"from": low, "to": high},
            )
