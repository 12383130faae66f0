"""Holds what an engine says of itself against what its bundle says, and tells each difference by name.

What the engine does not say is told as that, and never counts as equal. A difference that changes what is served
blocks: nothing is served by such an engine. One that only changes how much fits at once is a warning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from packaging.version import InvalidVersion, Version

from gates.booted.expected import UNREAD, Wanted
from gates.booted.told import Said
from gates.gate import clip, finding
from schemas.common import sha256_digest
from schemas.result import Finding, Severity
from schemas.runner import Agreement, Compared

MAX_WORDS = 20
"""Words of two command lines that are told where they differ."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is compared: the code of its finding, what it is, how much it weighs, and what a person can do."""

    code: str
    what: str
    advice: str
    severity: Severity = Severity.BLOCK


_REGISTER = "Register the bundle with the engine that is installed, or install the one that it names."
_BETWEEN = "Find what changed it between the runner and the engine: settings of a container engine, or a webhook."
_IMAGE = "See whether it is the same image for this kind of processor: `docker buildx imagetools inspect` lists them."
_ADDED = "Find what added it, such as a webhook or a namespace's defaults, and whether an engine should have it."
_SAMPLING = "State runtime.sampling, so that the engine is told it, or take away what overrides it."
_FILES = "Look at which files the engine was given: not those that the bundle names."
_TEMPLATE = "Look at which template the engine was given, and at what it makes of it while it loads."
_LIMITS = "Correct runtime, or the launch argument that says otherwise."
_LAYOUT = "Correct the section, or the launch argument that says otherwise."

ITEMS: Mapping[str, Item] = {
    "version": Item("engine-version-differs", "version", _REGISTER),
    "environment": Item("environment-differs", "environment's digest", _REGISTER),
    "arguments": Item("arguments-differ", "command line", _BETWEEN),
    "image": Item("image-differs", "image", _BETWEEN),
    "image_id": Item("image-id-differs", "image on its node", _IMAGE, Severity.WARN),
    "variables": Item("variables-differ", "environment", _BETWEEN),
    "variables_beyond": Item("variables-beyond", "list of variables beside its own", _ADDED, Severity.WARN),
    "confinement": Item("confinement-differs", "confinement", _BETWEEN),
    "resources": Item("resources-differ", "resources", _ADDED, Severity.WARN),
    "probes": Item("probes-differ", "probes", _ADDED, Severity.WARN),
    "containers": Item("containers-beyond", "list of containers beside its own", _ADDED, Severity.WARN),
    "model": Item("model-differs", "list of models", "Compare serving.served_name and adapters with what is served."),
    "model_path": Item("model-path-differs", "model's path", _FILES),
    "adapters": Item("adapters-differ", "list of adapters", _FILES),
    "parameters": Item("weights-differ", "number of parameters", _FILES),
    "context_tokens": Item("context-differs", "context of one request", _LIMITS),
    "slots": Item("slots-differ", "number of requests at once", _LIMITS, Severity.WARN),
    "kv_tokens": Item(
        "kv-tokens-short",
        "room of the KV cache in tokens",
        "Give the engine more memory, or promise fewer requests or less context: `bundle plan` adds it up.",
    ),
    "template": Item("template-differs", "chat template's digest", _TEMPLATE),
    "template_file": Item("template-file-differs", "chat template's file", _TEMPLATE),
    "tokenizer": Item("tokenizer-differs", "tokenizer", _FILES),
    "vocabulary": Item("tokenizer-differs", "number of tokens in the vocabulary", _FILES),
    "bos_token": Item("tokenizer-differs", "token that begins a text", _FILES),
    "eos_token": Item("tokenizer-differs", "token that ends a text", _FILES),
    "sampling": Item("sampling-differs", "sampling defaults", _SAMPLING),
    "sampling.temperature": Item("sampling-differs", "default temperature", _SAMPLING),
    "sampling.top_p": Item("sampling-differs", "default top_p", _SAMPLING),
    "sampling.top_k": Item("sampling-differs", "default top_k", _SAMPLING),
    "sampling.min_p": Item("sampling-differs", "default min_p", _SAMPLING),
    "sampling.repetition_penalty": Item("sampling-differs", "default repetition_penalty", _SAMPLING),
    "sampling.defaults": Item("sampling-differs", "source of sampling defaults", _SAMPLING),
    "quantization": Item("quantization-differs", "quantization", _LAYOUT, Severity.WARN),
    "kv_cache": Item("kv-cache-differs", "data type of the KV cache", _LAYOUT, Severity.WARN),
    "tensor_parallel": Item("layout-differs", "tensor-parallel degree", _LAYOUT, Severity.WARN),
    "prefix_caching": Item("prefix-caching-differs", "prefix cache", _LAYOUT, Severity.WARN),
}
"""What is compared, in the order in which it is told."""

ALWAYS = ("version", "arguments", "model", "context_tokens", "kv_tokens", "template", "tokenizer", "sampling")
"""What is told of every engine, also when it says nothing of it."""
_PARTS = {"tokenizer": ("vocabulary", "bos_token", "eos_token"), "sampling": ("sampling.",)}
"""Item → how the items begin that it is told by where the engine says these."""
BELOW_PLAN, MORE_MODELS, FILES_UNREAD = "kv-tokens-below-plan", "models-beyond", "files-unread"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison came to: a row for each thing, and a finding for each difference."""

    rows: tuple[Compared, ...]
    findings: tuple[Finding, ...]

    @property
    def blocking(self) -> list[Finding]:
        """Differences with which nothing is served."""
        return [one for one in self.findings if one.severity is Severity.BLOCK]


def compare(
    said: Mapping[str, Said],
    wanted: Mapping[str, Wanted],
    *,
    lenient: Sequence[str] = (),
    is_reported: bool = False,
) -> Comparison:
    """Hold an engine against its bundle.

    Args:
        said: what was seen of the engine, by item.
        wanted: what the bundle leads to, by item.
        lenient: items of which a difference is a warning here.
        is_reported: the engine runs elsewhere, for others too: what it serves besides is no difference.
    """
    rows: list[Compared] = []
    findings: list[Finding] = []
    for name in ITEMS:
        seen, should = said.get(name), wanted.get(name)
        if seen is None and not _is_told(name, said, should):
            continue
        found = [] if seen is None or should is None else _differences(name, seen, should, is_reported=is_reported)
        if name in lenient:
            found = [one.model_copy(update={"severity": Severity.WARN}) for one in found]
        rows.append(_row(name, seen, should, is_different=any(one.code == ITEMS[name].code for one in found)))
        findings += found
    if (unread := wanted.get(UNREAD)) is not None:
        findings.append(_unread(unread))
    return Comparison(tuple(rows), tuple(findings))


def _unread(should: Wanted) -> Finding:
    """Tell what the engine was not held against, since nobody could read it."""
    return finding(
        FILES_UNREAD,
        f"What the engine says was not held against files of the bundle that could not be read ({should.value}).",
        severity=Severity.WARN,
        pointer=should.source,
        found=should.value,
        advice="Look at what `bundle validate` says of these files.",
    )


def _is_told(name: str, said: Mapping[str, Said], should: Wanted | None) -> bool:
    """Tell whether a row is needed of what the engine does not say."""
    if name in _PARTS:
        return not any(one.startswith(_PARTS[name]) for one in said)
    if should is None:
        return name in ALWAYS
    # A part is told by the whole, unless the engine says others of its parts.
    wholes = [parts for parts in _PARTS.values() if name.startswith(parts)]
    return all(any(one.startswith(parts) for one in said) for parts in wholes)


def _row(name: str, seen: Said | None, should: Wanted | None, *, is_different: bool) -> Compared:
    if seen is None:
        outcome = Agreement.NOT_REPORTED
    elif should is None:
        outcome = Agreement.NOT_DECLARED
    else:
        outcome = Agreement.DIFFERS if is_different else Agreement.EQUAL
    if should is not None and seen is not None and should.how == "tail" and not is_different:
        should = replace(should, value=seen.value)  # without the words of a wrapper
    return Compared(
        item=name,
        outcome=outcome,
        expected=None if should is None else _shown(should.value, should.how),
        found=None if seen is None else _shown(seen.value, "tail" if name == "arguments" else "equal"),
        expected_by=None if should is None else clip(should.source, 256),
        found_by=None if seen is None else clip(seen.source, 256),
    )


def _shown(value: str, how: str) -> str:
    """Return a value as a row has it; of a command line the digest, since the engine's identity has its words."""
    if how in {"words", "tail"}:
        return sha256_digest(value.encode())
    return clip(f"at least {value}" if how == "least" else value)


def _differences(name: str, seen: Said, should: Wanted, *, is_reported: bool) -> list[Finding]:
    match should.how:
        case "least":
            return _short(name, seen, should)
        case "names":
            return _names(name, seen, should, is_reported=is_reported)
        case "words" | "tail":
            return _words(name, seen, should)
        case "version":
            agrees = _same_version(seen.value, should.value)
        case _:
            agrees = seen.value == should.value or _is_rounded(seen.value, should)
    return [] if agrees else [_finding(name, seen, should, found=seen.value, expected=should.value)]


def _finding(
    name: str, seen: Said, should: Wanted, *, found: str, expected: str, severity: Severity | None = None
) -> Finding:
    item = ITEMS[name]
    return finding(
        item.code,
        f"The engine's {item.what} is {clip(found, 300)} ({seen.source}), and the bundle says {clip(expected, 300)} "
        f"({should.source}).",
        severity=severity or item.severity,
        pointer=should.source,
        found=found,
        expected=expected,
        advice=item.advice,
    )


def _is_rounded(value: str, should: Wanted) -> bool:
    """Tell whether a count is what the engine makes of another by rounding it up."""
    if should.step == 1 or not (value.isdecimal() and should.value.isdecimal()):
        return False
    return 0 <= int(value) - int(should.value) < should.step


def _same_version(value: str, should: str) -> bool:
    """Tell whether a version is the one that is meant; a local part that nobody asked for, as +cpu, is none of it."""
    try:
        found, expected = Version(value), Version(should)
    except InvalidVersion:
        return value == should
    return found == expected or (expected.local is None and Version(found.public) == expected)


def _short(name: str, seen: Said, should: Wanted) -> list[Finding]:
    value = int(seen.value)
    if value < int(should.value):
        return [_finding(name, seen, should, found=seen.value, expected=f"at least {should.value}")]
    if should.enough is None or value >= should.enough:
        return []
    item = ITEMS[name]
    return [
        finding(
            BELOW_PLAN,
            f"The engine's {item.what} is {value} ({seen.source}), and all requests that the bundle promises at once, "
            f"each with its whole context, take {should.enough}.",
            severity=Severity.WARN,
            pointer=should.source,
            found=value,
            expected=f"at least {should.enough}",
            advice=item.advice,
        )
    ]


def _names(name: str, seen: Said, should: Wanted, *, is_reported: bool) -> list[Finding]:
    served, promised = seen.value.split(", "), should.value.split(", ")
    if set(promised) - set(served):
        return [_finding(name, seen, should, found=seen.value, expected=should.value)]
    beyond = [one for one in served if one not in promised]
    if not beyond or is_reported:
        return []
    message = f"The engine serves {', '.join(beyond)} too, which the bundle does not name."
    return [
        finding(
            MORE_MODELS,
            message,
            severity=Severity.WARN,
            pointer=should.source,
            found=seen.value,
            expected=should.value,
            advice=ITEMS[name].advice,
        )
    ]


def _words(name: str, seen: Said, should: Wanted) -> list[Finding]:
    """Compare two command lines, one word a line; a wrapper's words may stand before those of the engine."""
    found, expected = seen.value.split("\n"), should.value.split("\n")
    if found == (expected[-len(found) :] if should.how == "tail" else expected):
        return []
    more, less = list[str](), list[str]()
    changes = SequenceMatcher(None, found, expected, autojunk=False).get_opcodes()
    for kind, begin, end, other_begin, other_end in changes:
        if kind != "equal":
            # With the word before it, which names what a value is of.
            more += found[max(0, begin - 1) : end]
            less += expected[max(0, other_begin - 1) : other_end]
    shown = [" ".join(words[:MAX_WORDS]) or "none of these words" for words in (more, less)]
    return [_finding(name, seen, should, found=shown[0], expected=shown[1])]
