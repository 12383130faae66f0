"""Says whether configuration files make an engine run code that the model brings along.

`trust_remote_code=False` is no boundary: engines have passed it by again and again. So the inputs are looked at. Code
is accepted only by name, in the bundle's `engine.remote_code`, and then each file of it is part of the bundle.

Source: `dynamic_module_utils.py` of transformers for `auto_map`, and its hub kernels, whose repository
`_attn_implementation` names; `maybe_override_with_speculators` of vLLM for the model that a head's configuration names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gates.files.refusal import FileRefused, pointer

_TRUST: Final = "--trust-remote-code"
_SHORTEST_TRUST: Final = "--tru"
_KERNELS: Final = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
)
_CONFIG: Final = "config.json"
_DEEPEST: Final = 8
_ADVICE_LIST: Final = "name each file under engine.remote_code in -f, after somebody has read it"


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one configuration says about code, small enough to be remembered; empty when it says nothing."""
    modules = sorted(set(_modules(config)))
    hooks = sorted(set(_hooks(config, "", 0)))
    facts = {
        "modules": modules[:200],
        "hooks": [list(hook) for hook in hooks[:50]],
        "stands_for": _verifier(config.get("speculators_config")),
    }
    return {key: value for key, value in facts.items() if value}


def _modules(config: Mapping[str, Any]) -> Iterator[str]:
    auto_map = config.get("auto_map")
    # A class without a name is none that a loader asks for: heads that draft are published so, without the code.
    named = [value for key, value in auto_map.items() if key] if isinstance(auto_map, dict) else [auto_map]
    for value in named:
        for name in value if isinstance(value, list) else [value]:
            if name is not None:
                yield str(name)[:300]


def _verifier(told: Any) -> str | None:
    """Return the model that a head drafts for, by its own configuration."""
    if not isinstance(told, dict):
        return None
    verifier = told.get("verifier")
    return str(verifier.get("name_or_path") if isinstance(verifier, dict) else verifier)[:200]


def _hooks(value: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Find values that make a loader fetch or trust code, at any depth."""
    if depth > _DEEPEST:
        return
    if isinstance(value, list):
        for number, item in enumerate(value[:100]):
            yield from _hooks(item, place + pointer(number), depth + 1)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        here = place + pointer(key[:100])
        if key in _KERNELS:
            for name in item.values() if isinstance(item, dict) else [item]:
                if isinstance(name, str) and "/" in name:
                    yield here, name[:200]
        elif key == "trust_remote_code" and item not in (False, None):
            yield here, str(item)[:200]
        else:
            yield from _hooks(item, here, depth + 1)


def trusts(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> bool:
    """Tell whether an engine is told to run code that a model brings along."""
    named = any(_is_trust(word) for word in arguments)
    set_ = any(
        "TRUST_REMOTE_CODE" in name and value.casefold() not in ("", "0", "false", "no")
        for name, value in (variables or {}).items()
    )
    return named or set_


def _is_trust(word: str) -> bool:
    """Tell whether a word asks for trust, also abbreviated: engines take the beginning of an option for all of it."""
    name, given, value = word.casefold().partition("=")
    name = name.replace("_", "-")
    is_named = name.startswith(_SHORTEST_TRUST) and _TRUST.startswith(name)
    return is_named and not (given and value in ("false", "0", "no"))


def refuse_code(
    said: Mapping[str, Mapping[str, Any]],
    *,
    model_types: Mapping[str, str],
    is_trusted: bool,
    accepted: Iterable[str] = (),
    own: frozenset[str] = frozenset(),
) -> Iterator[FileRefused]:
    """Return a refusal for each way in which an engine could run code that the bundle does not accept by name.

    Args:
        said: configuration file → what `told` returned for it.
        model_types: folder → model type of the configuration in it; where a folder has none, that of the root's.
        is_trusted: the engine is told to trust remote code.
        accepted: files with code that the bundle accepts.
        own: model types that the engine implements itself although their publishers ship code. Their code does not run
            as long as the engine is not told to trust it.
    """
    accepted = frozenset(accepted)
    for file, facts in sorted(said.items()):
        for place, value in facts.get("hooks", ()):
            yield _refused(file, "makes a loader fetch or trust code", place, value, "remove it from the file")
        if file == _CONFIG and "stands_for" in facts:
            yield _elsewhere(facts["stands_for"])
        is_own = model_types.get(file.rpartition("/")[0], model_types.get("", "")) in own
        for module in facts.get("modules", ()):
            yield from _refuse_module(file, module, accepted, runs=is_trusted, is_own=is_own)
    if is_trusted and not accepted:
        message = "lets the engine run code that comes with a model, and names none"
        yield FileRefused(
            "remote-code",
            message,
            file="",
            found="trust remote code",
            expected="engine.remote_code",
            advice=_ADVICE_LIST,
        )


def _refuse_module(
    file: str, module: str, accepted: frozenset[str], *, runs: bool, is_own: bool
) -> Iterator[FileRefused]:
    repository, elsewhere, name = module.rpartition("--")
    source = name.rpartition(".")[0].replace(".", "/") + ".py"
    folder = file.rpartition("/")[0]
    path = f"{folder}/{source}" if folder else source
    if not runs and is_own:
        return  # the engine's own implementation is what runs
    if elsewhere:
        advice = f"put the code beside the weights and {_ADVICE_LIST}"
        yield _refused(file, f"takes code from another repository, {repository}", "/auto_map", module, advice)
    elif path not in accepted:
        advice = (
            _ADVICE_LIST if runs else f"remove auto_map if the engine knows this model by itself, or {_ADVICE_LIST}"
        )
        yield _refused(file, f"needs code that comes with the model, {path}", "/auto_map", module, advice)


def _elsewhere(verifier: str) -> FileRefused:
    said = f"is that of a head that drafts: the engine would load the model that it names, {verifier}, in its place"
    return FileRefused(
        "launch-refused",
        said,
        file=_CONFIG,
        pointer="/speculators_config/verifier",
        found=verifier,
        expected="weights of the bundle",
        advice="give the model that it drafts for, and name this as its draft in -f",
    )


def _refused(file: str, said: str, place: str, found: str, advice: str) -> FileRefused:
    return FileRefused("remote-code", said, file=file, pointer=place, found=found, expected="no code", advice=advice)
