"""Reads the JSON files of a bundle: strictly, and within what published models need."""

import re
from pathlib import Path
from typing import Any, BinaryIO

from gates.files import magic
from gates.files.refusal import FileRefused, opened
from schemas.strict_json import NotStrictJson, strict_json

MAX_BYTES = 64 * 1024 * 1024
"""Largest JSON file. A published `tokenizer.json` of 262,144 tokens has 33 MB."""
MAX_DIGITS = 40
"""Digits of a whole number: tokenizers say `model_max_length` 10^30 where they have no limit."""
_UNLIMITED = re.compile(
    rb'(?<!\\)("time_step_limit"\s{0,99}:\s{0,99}\[[\s0-9.eE+-]{1,99},\s{0,99})Infinity(\s{0,99}\])'
)
"""The one place where published configurations have a number that JSON does not know: Mamba-2's time step without an
upper limit, as transformers before version 5 wrote it. Source: config.json of nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base
and mistralai/Mamba-Codestral-7B-v0.1; huggingface/transformers#42959."""


def load_json(path: Path, name: str | None = None, *, limit: int = MAX_BYTES) -> Any:
    """Return what a JSON file holds.

    Args:
        path: of the file; no link is followed.
        name: of the file in the bundle, when the path does not end in it.
        limit: largest size, in bytes.

    Raises:
        FileRefused: it cannot be read, is something else than JSON, or JSON that parsers disagree on.
    """
    with opened(path, name) as (file, size):
        return read_json(file, size, limit=limit)


def load_object(path: Path, name: str | None = None, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds; see `load_json`. Raises FileRefused also for another kind of value."""
    with opened(path, name) as (file, size):
        return read_object(file, size, limit=limit)


def read_json(file: BinaryIO, size: int, *, limit: int = MAX_BYTES) -> Any:
    """Return what an opened JSON file holds; see `load_json`. Refusals do not name the file."""
    if size > limit:
        said = f"has {size} bytes; at most {limit} of JSON are read"
        raise FileRefused("too-large", said, found=size, expected=f"at most {limit} bytes")
    if size == 0:
        raise FileRefused("empty-file", "is empty", offset=0, found=0, expected="JSON")
    file.seek(0)
    raw = file.read(size + 1)
    magic.refuse_disguise(raw[: magic.HEAD_BYTES], size, "JSON")
    raw = _UNLIMITED.sub(rb"\g<1>1.0e+308\g<2>", raw)  # of the same length: offsets stay what they are
    try:
        return strict_json(raw, limit=limit, digits=MAX_DIGITS)
    except NotStrictJson as error:
        expected = "JSON that every parser reads alike"
        raise FileRefused(
            error.code,
            error.message,
            offset=error.offset,
            pointer=error.pointer,
            found=error.found,
            expected=expected,
        ) from None


def read_object(file: BinaryIO, size: int, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object that an opened file holds; see `load_object`."""
    value = read_json(file, size, limit=limit)
    if not isinstance(value, dict):
        raise FileRefused(
            "json-type", "is not a JSON object", pointer="", found=type(value).__name__, expected="object"
        )
    return value
