"""Reads the header of a weight file of either format."""

from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from gates.files.gguf import read_gguf
from gates.files.header import Array, Header, Tensor
from gates.files.refusal import FileRefused, opened
from gates.files.safetensors import read_safetensors

__all__ = ["Array", "Header", "Tensor", "header", "read", "tensors"]


def tensors(path: Path, name: str | None = None) -> tuple[Tensor, ...]:
    """Return the tensors of a safetensors or GGUF file, in the order of their bytes. Only its header is read.

    Args:
        path: of the file; no link is followed.
        name: of the file in the bundle, when the path does not end in it, as in the Hub's cache.

    Raises:
        FileRefused: it is not sound, or no weight file by its name.
    """
    return header(path, name).tensors


def header(path: Path, name: str | None = None, *, keep: Collection[str] = ()) -> Header:
    """Return the whole header of a safetensors or GGUF file, with what it says besides its tensors.

    Args:
        path: of the file; no link is followed.
        name: of the file in the bundle, when the path does not end in it.
        keep: keys of a GGUF header whose arrays are wanted; of the others only type and length are told.

    Raises:
        FileRefused: it is not sound, or no weight file by its name.
    """
    name = path.name if name is None else name
    with opened(path, name) as (file, size):
        return read(file, size, name, keep=keep)


def read(file: BinaryIO, size: int, name: str, *, keep: Collection[str] = ()) -> Header:
    """Return the header of an opened weight file; see `header`. Refusals do not name the file."""
    if name.endswith(".gguf"):
        return read_gguf(file, size, name, keep=keep)
    if name.endswith(".safetensors"):
        return read_safetensors(file, size, name)
    raise FileRefused("weights-format", "is no weight file by its name", expected="*.safetensors or *.gguf")
