"""What a weight file says about itself, whatever its format."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gates.files.refusal import FileRefused, pointer

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0") | {chr(code) for code in range(0xFE00, 0xFE10)}
"""Characters that count as printable and show nothing. Source: Unicode's property Default_Ignorable_Code_Point."""
MAX_NAME = 256
"""Longest name of a tensor, in characters."""


class Tensor(NamedTuple):
    """One tensor of one file. A tuple, because a file may hold 65,536.

    `dtype` is spelled as the format does (`BF16`, `F8_E4M3`, `Q4_K`). `shape` has the outermost dimension first in
    both formats, as PyTorch prints it; a GGUF file stores it the other way round. `offset` counts bytes from the
    start of the file, and `size` is in bytes. `file` is the name that the reader was given.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size: int

    @property
    def values(self) -> int:
        """How many numbers it holds; packed formats hold several weights in one."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Array:
    """A list in a GGUF header: its type, its length, and its items where the caller asked to keep them."""

    kind: str
    count: int
    items: Sequence[str | int | float] | None = None


Value = str | int | float | bool | Array


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a weight file. Tensors come in the order of their bytes; `data_offset` is where these begin."""

    format: str
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        return sum(tensor.values for tensor in self.tensors)

    def dtypes(self) -> dict[str, int]:
        """Return dtype → bytes stored in it, most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
        return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def check_name(name: str, offset: int) -> None:
    """Refuse a tensor name that is not plain, or that a loader could take for a path or for the metadata.

    Raises:
        FileRefused: with the code `tensor-name`.
    """
    if not name:
        said = "empty"
    elif len(name) > MAX_NAME:
        said = f"longer than {MAX_NAME} characters"
    elif not name.isprintable() or name != name.strip():
        said = "not printable: it has control, bidirectional or surrounding white space characters"
    elif not _UNSEEN.isdisjoint(name):
        said = "written with a character that shows nothing, so that two names could look alike"
    elif not unicodedata.is_normalized("NFC", name):
        said = "not in Unicode's form NFC, so that two names could look alike"
    elif name.startswith("/") or "\\" in name or ".." in name.split("/"):
        said = "a path, and some loaders write names as files"
    elif name.casefold() == "__metadata__":
        said = "reserved for metadata"
    else:
        return
    raise FileRefused(
        "tensor-name",
        f"names a tensor in a way that is {said}",
        offset=offset,
        pointer=pointer(name[:MAX_NAME]),
        found=ascii(name[:MAX_NAME]),
        expected=f"1 to {MAX_NAME} printable characters in NFC, no path",
    )
