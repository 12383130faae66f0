"""Checks of what a bundle would take, and of what could run: by the very functions that registering uses.

`gates.files.contents.select` judges names, `gates.files.remote_code.refuse_code` what configurations say. `bundle
create` and the service ask the same two, so that none of them lets in what another refuses.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gates.files import remote_code
from gates.files.contents import Reader, Selection, is_pickled, select
from gates.files.launch import refuse_launch
from gates.files.refusal import FileRefused
from gates.files.strict_json import load_json
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.listing import Entry, sentence
from gates.static.rules import implemented
from schemas.bundle import Role
from schemas.result import Severity
from schemas.short import agreeing, many

JUDGED = frozenset({"archive", "program", "remote-code", "launch-refused", "role-hides", "weights-foreign"})
"""Codes of refusals that are codes of the catalogue too."""
_EXPECTED = {
    "archive": "no archive",
    "program": "no program",
    "remote-code": "no code",
    "pickle-weights": "safetensors",
    "launch-refused": "nothing from outside the bundle",
}
"""Code → what is expected, where a refusal does not say it."""
_MAX_JSON_BYTES = 4 * 1024 * 1024
"""More than any configuration has; vocabularies, which may be larger, are read by the checks of tokenizers."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """Files that one choice is made among, by the names they have there; `shown` goes before them in findings."""

    shown: str
    entries: Mapping[str, Entry]
    roles: Mapping[str, Role] | None = None

    def path(self, name: str) -> str:
        return f"{self.shown}/{name}" if self.shown else name


def check(c: Composition) -> Iterator[Flaw]:
    """Find pickled weights, archives, programs, and code that would run."""
    reader = Reader(c.engine or "external", c.declared.arguments.words, code=c.declared.code)
    said: dict[str, dict[str, Any]] = {}
    types: dict[str, str] = {}
    code: list[str] = []
    ran = False
    unread = {one.file for part in c.parts for one in part.flaws}
    for folder in _folders(c):
        selection = select(folder.entries, reader, folder.roles)
        yield from _pickles(c, folder, selection)
        for one in selection.refused:
            if one.code in JUDGED:
                ran = ran or one.code == "remote-code"
                yield _as_flaw(one, folder.path(one.file or ""))
        code += [folder.path(one.path) for one in selection.left_out if one.code == "code"]
        for name in selection.kept:
            if name.endswith(".json") and not name.endswith(".index.json"):
                path = folder.path(name)
                config = yield from _configuration(folder.entries[name], path, is_told=path in unread)
                if told := remote_code.told(config):
                    said[path] = told
                if path.rpartition("/")[2] == "config.json" and isinstance(config.get("model_type"), str):
                    types[path.rpartition("/")[0]] = config["model_type"]
    refused = list(
        remote_code.refuse_code(
            said,
            model_types=types,
            is_trusted=remote_code.trusts(c.declared.arguments.words, c.declared.variables),
            accepted=c.declared.code,
            own=implemented(c.declared.engine, c.declared.version),
        )
    )
    yield from (_as_flaw(one, one.file or "") for one in refused)
    launch = refuse_launch(c.engine, c.declared.arguments.words, c.declared.variables, c.listing.entries)
    yield from (_as_flaw(one, "") for one in launch)
    if code and not refused and not ran:
        lie = agreeing(len(code), "lies", "lie")
        message = f"{many(len(code), 'file')} of code such as {code[0]} {lie} here; no engine runs code."
        yield flaw("code-left-out", message, file=code[0], found=sorted(code), expected=[])


def _folders(c: Composition) -> Iterator[_Folder]:
    """Yield the directory or bundle as a whole, and each adapter and draft that has a folder of its own."""
    if c.roles is not None:
        yield _Folder("", c.listing.entries, {path: c.roles[path] for path in c.listing.entries})
        return
    own = [part for _, part in c.adapters if part.folder] + (
        [c.draft] if c.draft is not None and c.draft.folder else []
    )
    taken = {entry.place for part in own for entry in part.entries.values()}
    yield _Folder("", {path: entry for path, entry in c.listing.entries.items() if entry.place not in taken})
    for part in own:
        yield _Folder(part.folder, part.entries)


def _configuration(entry: Entry, path: str, *, is_told: bool) -> Generator[Flaw, None, dict[str, Any]]:
    """Return the object that a file of JSON holds, else an empty one; a finding where that is not told yet."""
    if entry.is_stub or entry.size > _MAX_JSON_BYTES:
        return {}
    try:
        value = load_json(entry.place, path)
    except FileRefused as refused:
        if not is_told:
            where = refused.pointer or (None if refused.offset is None else f"byte {refused.offset}")
            yield flaw(
                "config-unparseable",
                f"{path} {refused}.",
                file=path,
                pointer=where,
                found={"reason": refused.code, "offset": refused.offset, "value": refused.found},
                expected=refused.expected or "JSON",
                advice=sentence(refused.advice),
            )
        return {}
    return value if isinstance(value, dict) else {}


def _pickles(c: Composition, folder: _Folder, selection: Selection) -> Iterator[Flaw]:
    refused = [one for one in selection.refused if one.code == "pickle-weights"]
    # What lies in folders that no engine reads, such as Meta's own form under original/, is nothing to speak of.
    aside = [one.path for one in selection.left_out if is_pickled(one.path)]
    names = sorted(folder.path(path) for path in aside if "/" not in path or selection.refused)
    asked = c.declared.arguments.get("--load-format")
    has_others = any(name.endswith((".safetensors", ".gguf")) for name in folder.entries)
    readable = ["*.gguf"] if c.engine == "llamacpp" else ["*.safetensors"]
    for one in refused:
        if one.file:
            yield _as_flaw(one, folder.path(one.file))
        elif one.expected == "--load-format safetensors":
            message = f"Pickled weights would be loaded: the launch arguments ask for them (--load-format {asked})."
            yield flaw(
                "pickle-weights",
                message,
                file=next(iter(names), None),
                pointer="--load-format",
                found={"files": names, "load_format": asked},
                expected={"files": readable, "load_format": "safetensors"},
                advice="Leave --load-format out, and convert the weights to safetensors where there are no others.",
            )
            return
        elif not has_others:
            said = agreeing(
                len(names), f"The pickled file {names[0]}", f"{len(names)} pickled files such as {names[0]}"
            )
            message = f"{said} would be loaded as weights: there are no others."
            yield flaw("pickle-weights", message, file=names[0], found=names, expected=readable)
            return
    if names and not refused:
        several = f"{len(names)} pickled files such as {names[0]} lie beside the weights; a bundle leaves them out."
        one_file = f"The pickled file {names[0]} lies beside the weights; a bundle leaves it out."
        yield flaw(
            "pickle-weights",
            agreeing(len(names), one_file, several),
            severity=Severity.INFO,
            file=names[0],
            found=names,
            expected=[],
            advice="Nothing; delete what no engine needs, if you like.",
        )


def _as_flaw(one: FileRefused, path: str) -> Flaw:
    return flaw(
        one.code,
        f"{path or 'The launch'} {one.message}.",
        file=path or None,
        pointer=one.pointer or (None if path else "--trust-remote-code"),
        found=one.found or one.message,
        expected=one.expected or _EXPECTED.get(one.code, "what the engine reads"),
    )
