"""Weight files by their headers alone: a file of the right length, of which all that follows the header is a hole."""

import io
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from gates.files.gguf import read_gguf
from gates.files.refusal import FileRefused
from gates.sources.fetch import check_opened
from gates.sources.source import Item, Resolved, Source, SourceRefused

MAX_FRONT_BYTES: Final = 128 * 1024 * 1024
"""Most bytes read of a weight file: more than any header that is accepted."""
WEIGHTS: Final = (".safetensors", ".gguf")
_FIRST_BYTES = 1 << 20
_WHOLE = frozenset(
    {
        "config.json",
        "adapter_config.json",
        "params.json",
        "hf_quant_config.json",
        "quant_config.json",
        "quantization_config.json",
        "quantize_config.json",
    }
)


def is_read_whole(path: str) -> bool:
    """Tell whether a file is one of the small ones that a plan reads."""
    return PurePosixPath(path).name in _WHOLE or path.endswith(".safetensors.index.json")


def fetch_front(source: Source, resolved: Resolved, item: Item, place: Path) -> None:
    """Write a weight file's header to a file of the whole one's length. Nothing can verify a part of a file.

    Raises:
        SourceRefused: also `end-unknown`, when nobody says how long it is.
        SourceUnavailable.
    """
    with source.open(resolved, item, offset=0, tag=None) as opened:
        check_opened(item, opened)
        size = opened.size if item.size is None else item.size
        if size is None:
            raise SourceRefused("end-unknown", "is answered without a length, which a plan needs", file=item.path)
        write_front(opened.chunks, size, item.path, place)


def write_front(chunks: Iterable[bytes], size: int, name: str, place: Path) -> None:
    """Write what the header takes of a file's bytes to a file of its length, and take no more of them than that.

    Args:
        chunks: the file's bytes from its beginning.
        size: of the whole file, in bytes.
        name: which tells the format.
        place: of the file to be made.
    """
    most, front, tried = min(size, MAX_FRONT_BYTES), bytearray(), 0
    for chunk in chunks:
        front += chunk
        if len(front) >= most:
            break
        if name.endswith(".safetensors"):
            if len(front) >= 8 and len(front) >= 8 + int(struct.unpack_from("<Q", front)[0]):
                break
        elif len(front) >= max(_FIRST_BYTES, 2 * tried):
            tried = len(front)
            if _has_header(bytes(front), size, name):
                break
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as out:
        out.write(front[:most])
        out.truncate(size)


def _has_header(front: bytes, size: int, name: str) -> bool:
    """Tell whether these bytes of a GGUF file are enough to read its header, or to refuse it."""
    try:
        read_gguf(io.BytesIO(front), size, name)
    except FileRefused as refused:
        return refused.code != "source-unstable"  # it ends here, before the header does
    return True
