"""The file-name policy: a name that every file system, shell and reader takes for the same one.

No name is changed to fit, since nobody can know what the next system makes of it: it is refused.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from gates.files.refusal import FileRefused
from schemas.common import check_path, folded

MAX_BYTES = 240
MAX_PART = 120
MAX_DEPTH = 6

_DEVICE = re.compile("(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\\$?|conout\\$?)", re.IGNORECASE)
_EXPECTED = "1 to 120 of A-Z, a-z, 0-9, '.', '_', '+' and '-' in each part, not starting with '.', '+' or '-'"
_RENAME = "rename it, or leave it out with --exclude"


def refuse_hostile(path: str) -> FileRefused | None:
    """Return the refusal of a name that nobody gives in good faith, even of a file that is left out; else None.

    These lead out of a folder, or look like another name: `name-path`, `name-control`.
    """
    if path.startswith("/") or "\\" in path or re.match("[A-Za-z]:", path) or not path:
        return _refused("name-path", path, "has a name that is not relative", "a relative path with '/'")
    if any(part in {"", ".", ".."} for part in path.split("/")):
        return _refused("name-path", path, "has a name with empty, '.' or '..' parts", "no such parts")
    for mark in path:
        # Control, format (with those that turn the direction of text), surrogate and private characters.
        if unicodedata.category(mark) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
            said = f"has the character {mark!a} in its name, which cannot be seen or is no text"
            return _refused("name-control", path, said, "printable characters")
    return None


def refuse_name(path: str) -> FileRefused | None:
    """Return the refusal of a name that no bundle may hold, or None.

    The rule is `schemas.common.check_path`; this says which part of it is broken: `name-path`, `name-control`,
    `name-length`, `name-depth`, `name-reserved`, `name-start`, `name-ending`, `name-unicode` or `name-characters`.
    """
    hostile = refuse_hostile(path)
    if hostile is not None:
        return hostile
    parts = path.split("/")
    if len(path.encode()) > MAX_BYTES or max(map(len, parts)) > MAX_PART:
        said = f"has a name of {len(path.encode())} bytes"
        return _refused("name-length", path, said, f"{MAX_BYTES} bytes, {MAX_PART} characters a part")
    if len(parts) > MAX_DEPTH:
        return _refused("name-depth", path, f"lies {len(parts) - 1} folders deep", f"at most {MAX_DEPTH - 1} folders")
    for part in parts:
        if _DEVICE.fullmatch(part.split(".")[0].rstrip(" ")):
            return _refused("name-reserved", path, f"has the part {part}, a device on Windows", "another name")
        if part.startswith((".", "-", "+")):
            return _refused("name-start", path, f"has a part that starts with '{part[0]}'", _EXPECTED)
        if part.endswith((".", " ")):
            said = f"has a part that ends in {part[-1]!r}, which Windows leaves out"
            return _refused("name-ending", path, said, "no '.' or space at the end")
        if not unicodedata.is_normalized("NFC", part):
            return _refused("name-unicode", path, "has a name that is not in Unicode's form NFC", "NFC")
    try:
        check_path(path)
    except ValueError:
        odd = next((mark for mark in path if not re.match(r"[A-Za-z0-9._+/-]", mark)), "")
        said = f"has the character {odd!a} in its name, which not every system allows"
        return _refused("name-characters", path, said, _EXPECTED)
    return None


def collisions(paths: Iterable[str]) -> Iterator[FileRefused]:
    """Return a refusal for each name that a file system could take for another (`case-collision`, `name-is-folder`)."""
    listed = sorted(paths)
    seen: dict[str, str] = {}
    for path in listed:
        other = seen.setdefault(folded(path), path)
        if other != path:
            said = f"differs from {other} only in case or Unicode form"
            yield _refused("case-collision", path, said, "names that differ otherwise")
    for path in listed:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parts := parents) + 1):
            file = seen.get(folded("/".join(parts[:depth])))
            if file is not None:
                yield _refused("name-is-folder", path, f"lies in a folder that is also the file {file}", "one of them")
                break


def _refused(code: str, path: str, said: str, expected: str) -> FileRefused:
    return FileRefused(code, said, file=path, found=path, expected=expected, advice=_RENAME)
