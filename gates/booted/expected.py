"""What an engine should say of itself, by its bundle: the document's sections, its files and the launch arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gates.booted.told import Report, adapter, number, reports, shown, table
from gates.files.header import Array, Header
from gates.files.refusal import FileRefused
from gates.files.strict_json import load_object
from gates.files.weights import header
from gates.static.rules import is_within
from schemas.bundle import Bundle, File, Role
from schemas.common import sha256_digest

_TOKENS = "tokenizer.ggml.tokens"
UNREAD = "files"
"""Item under which it is told which of the bundle's files could not be read."""
_MAX_TEMPLATE_BYTES = 8 * 1024 * 1024
_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one thing should be, as text, and what says so.

    `how` it is held against what the engine says: equal; least, a count that may be larger; version, which may have a
    local part; names, of which none may be missing; words, of a command line; tail, the same, before which a wrapper's
    may have stood; unread, files of which nothing is known. `step` is what the engine rounds a count up to. `enough` is
    the count under which not all fits at once that should.
    """

    value: str
    source: str
    how: Literal["equal", "least", "version", "names", "words", "tail", "unread"] = "equal"
    step: int = 1
    enough: int | None = None


_SECTIONS: Mapping[str, tuple[str, Callable[[Bundle], object]]] = {
    "context_tokens": ("runtime.context_tokens", lambda bundle: bundle.runtime.context_tokens),
    "slots": ("runtime.max_sequences", lambda bundle: bundle.runtime.max_sequences),
    "quantization": ("quantization.method", lambda bundle: bundle.quantization.method),
    "kv_cache": ("quantization.kv_cache", lambda bundle: bundle.quantization.kv_cache),
    "tensor_parallel": ("topology.tensor_parallel", lambda bundle: bundle.topology.tensor_parallel),
    "prefix_caching": ("runtime.prefix_caching", lambda bundle: bundle.runtime.prefix_caching),
}
"""Item → the section that says it, and what it says; nothing is wanted of what it leaves open."""


def wanted(bundle: Bundle, root: Path, arguments: Sequence[str]) -> dict[str, Wanted]:
    """Return what an engine should say, by item. What neither bundle nor files say is absent.

    Args:
        bundle: that it was booted from.
        root: folder with the bundle's files.
        arguments: command line that its driver makes of the bundle.
    """
    runtime = bundle.runtime
    names = [bundle.serving.served_name, *(one.name for one in bundle.adapters or [])]
    found = {
        "version": Wanted(bundle.engine.version, "engine.version", "version"),
        "model": Wanted(", ".join(names), "serving.served_name", "names"),
        "kv_tokens": Wanted(
            str(runtime.context_tokens),
            "runtime.context_tokens",
            "least",
            enough=runtime.context_tokens * runtime.max_sequences,
        ),
    }
    of_files = _of_files(bundle, root)
    for row in reports(bundle.engine.name):
        if row.form == "adapters":
            found[row.item] = _adapters(bundle, arguments)
        elif row.item in _SECTIONS:
            source, read = _SECTIONS[row.item]
            if (value := read(bundle)) is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                found[row.item] = Wanted(text, source, step=row.step)
        elif (told := _argument(row, arguments)) is not None:
            found[row.item] = told
    return of_files | found


def _adapters(bundle: Bundle, arguments: Sequence[str]) -> Wanted:
    """Return the adapters in the bundle's order, at the paths of the launch arguments, in force for nobody who asks."""
    places = [value.partition("=")[2] for name, value in pairwise(arguments) if name == "--adapter"]
    files = [one.files[0] for one in bundle.adapters or []]
    told = [adapter(number, places[number] if number < len(places) else file, 0) for number, file in enumerate(files)]
    return Wanted(shown("; ".join(told)) or "none", "adapters")


def _argument(row: Report, arguments: Sequence[str]) -> Wanted | None:
    """Return what a launch argument says that a row names: the last time that it is given."""
    if row.argument is None or row.argument not in arguments[:-1]:
        return None
    place = len(arguments) - 1 - [*reversed(arguments)].index(row.argument)
    if place + 1 >= len(arguments):
        return None
    text = arguments[place + 1]
    if row.form == "number":
        try:
            text = number(float(text))
        except ValueError:
            return None
    return Wanted(shown(text), f"argument {row.argument}")


# ------------------------------------------------------------------------------------------------------ files


def _of_files(bundle: Bundle, root: Path) -> dict[str, Wanted]:
    """Return what the bundle's files say. What cannot be read is told as that, and takes nothing else with it."""
    place, unread = _Place(bundle, root), list[str]()
    found: dict[str, Wanted] = {}
    for part in _PARTS:
        try:
            found |= _read(place, part)
        except FileRefused as error:
            unread.append(f"{part}: {error}")
        except (OSError, ValueError) as error:
            unread.append(f"{part}: {type(error).__name__}")
    if unread:
        found[UNREAD] = Wanted("; ".join(unread), "files", "unread")
    return found


class _Place:
    """A bundle's files, equal to any other of the same bundle: whatever its folder, its bytes are the same."""

    def __init__(self, bundle: Bundle, root: Path) -> None:
        self.bundle, self.root = bundle, root

    @property
    def weights(self) -> Sequence[File]:
        """Weights with a header that says more than tensors."""
        return self.bundle.weights() if self.bundle.model.format == "gguf" else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and other.bundle.digest == self.bundle.digest

    def __hash__(self) -> int:
        return hash(self.bundle.digest)


@lru_cache(maxsize=256)
def _read(place: _Place, part: str) -> Mapping[str, Wanted]:
    return _PARTS[part](place)


@lru_cache(maxsize=64)
def _headers(place: _Place) -> tuple[tuple[str, Header], ...]:
    return tuple((file.path, header(place.root / file.path, file.path, keep=(_TOKENS,))) for file in place.weights)


def _said_of(place: _Place) -> set[str]:
    """Return what engines of the bundle's kind say of themselves."""
    return {row.item for row in reports(place.bundle.engine.name)}


def _of_weights(place: _Place) -> dict[str, Wanted]:
    if not _said_of(place) & {"vocabulary", "parameters", "bos_token", "eos_token"}:
        return {}
    headers = _headers(place)
    if not headers:
        return {}
    path, first = headers[0]
    parameters = Wanted(str(sum(one.parameters for _, one in headers)), f"file {path}")
    return _of_gguf(first, path, place.bundle) | {"parameters": parameters}


def _of_special_tokens(place: _Place) -> dict[str, Wanted]:
    is_asked = _said_of(place) & {"bos_token", "eos_token"} and place.bundle.tokenizer.origin == "files"
    return _of_tokenizer(place.bundle, place.root) if is_asked else {}


def _of_template(place: _Place) -> dict[str, Wanted]:
    if (template := _template(place)) is None:
        return {}
    text, source = template
    return {"template": Wanted(sha256_digest(_rewritten(place.bundle.engine.name, text).encode()), source)}


_PARTS: Mapping[str, Callable[[_Place], Mapping[str, Wanted]]] = {
    "weights": _of_weights,
    "tokenizer": _of_special_tokens,
    "template": _of_template,
}
"""Kind of file → what it says; a later one has the last word."""


def _of_gguf(first: Header, path: str, bundle: Bundle) -> dict[str, Wanted]:
    """Return what the header of the first GGUF file says of the tokenizer and of sampling."""
    metadata, source = first.metadata, f"file {path}"
    tokens = metadata.get(_TOKENS)
    found = {}
    if isinstance(tokens, Array):
        found["vocabulary"] = Wanted(str(tokens.count), source)
        for name in ("bos", "eos"):
            place = metadata.get(f"tokenizer.ggml.{name}_token_id")
            text = tokens.items[place] if tokens.items and type(place) is int and place < len(tokens.items) else None
            # What is not plain may be written otherwise than it is said, as a space or a byte.
            if isinstance(text, str) and text.isascii() and text.isprintable() and text:
                found[f"{name}_token"] = Wanted(shown(text), source)
    defaults = next(
        (
            one
            for one in table(bundle.engine.name).get("defaults", ())
            if is_within(bundle.engine.version, one["versions"])
        ),
        None,
    )
    for name, key in _GGUF_SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"sampling.{name}"] = Wanted(number(value), f"{source} general.sampling.{key}")
        elif defaults is not None:
            found[f"sampling.{name}"] = Wanted(number(defaults["value"][name]), "the engine's own default")
    return found


def _template(place: _Place) -> tuple[str, str] | None:
    """Return the chat template in force and where it is from; None where the bundle names none."""
    bundle, root, template = place.bundle, place.root, place.bundle.template
    if template.file is not None:
        with (root / template.file).open(encoding="utf-8") as file:  # line ends as the engine reads them
            return file.read(_MAX_TEMPLATE_BYTES), f"file {template.file}"
    if template.origin == "weights" and (headers := _headers(place)):
        path, first = headers[0]
        text = first.metadata.get("tokenizer.chat_template")
        return (text, f"file {path}") if isinstance(text, str) and text else None
    if template.origin == "tokenizer_config":
        return _of_tokenizer_config(bundle, root)
    return None


def _of_tokenizer_config(bundle: Bundle, root: Path) -> tuple[str, str] | None:
    path = _tokenizer_config(bundle)
    text: Any = None if path is None else load_object(root / path, path).get("chat_template")
    return (text, f"file {path}") if isinstance(text, str) and text else None


def _of_tokenizer(bundle: Bundle, root: Path) -> dict[str, Wanted]:
    """Return the tokens that begin and end a text, where the tokenizer's configuration says them alone."""
    path = _tokenizer_config(bundle)
    names = {PurePosixPath(file.path).name for file in bundle.files}
    if path is None or "special_tokens_map.json" in names:
        return {}
    told = load_object(root / path, path)
    found = {}
    for name in ("bos_token", "eos_token"):
        value = told.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = Wanted(shown(text), f"file {path}")
    return found


def _tokenizer_config(bundle: Bundle) -> str | None:
    """Return the path of the shallowest tokenizer_config.json; None when there is none."""
    paths = [
        file.path
        for file in bundle.files
        if file.role is Role.TOKENIZER and PurePosixPath(file.path).name == "tokenizer_config.json"
    ]
    return min(paths, key=lambda one: (one.count("/"), one), default=None)


def _rewritten(engine: str, text: str) -> str:
    """Return what an engine makes of a template before it uses it."""
    for rule in table(engine).get("rewrites", ()):
        if all(part in text for part in rule["has"]):
            text = text.replace(rule["from"], rule["to"])
    if "trims" in table(engine):
        text = text.replace("\r\n", "\n").removesuffix("\n")
    return text
