"""The tensor files of one folder: what each holds, what the index says, and which copy an engine loads."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gates.files.contents import is_variant, role_of
from gates.files.header import Header, Tensor
from gates.files.refusal import FileRefused
from gates.files.weights import header as read_header
from gates.static.flaw import Flaw, flaw
from gates.static.listing import Entry
from schemas.bundle import Role

_NUMBERED = re.compile(r"(?P<stem>.*?)-?(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<rest>.*)\.(safetensors|gguf)")
CONSOLIDATED = re.compile(r"consolidated(-[0-9]{5}-of-[0-9]{5}|\.[0-9]{2})?\.safetensors")
_CHUNK = 1 << 20
_ZERO_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in its file."""

    tensor: Tensor
    entry: Entry

    @property
    def offset(self) -> int:
        """Where its bytes start in the file."""
        return self.tensor.offset

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self.tensor.size


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor file. It has no header when it cannot be read."""

    entry: Entry
    header: Header | None

    @property
    def data_bytes(self) -> int:
        """Bytes of its tensors."""
        return 0 if self.header is None else self.entry.size - self.header.data_offset


class Weights:
    """The tensor files of a folder."""

    def __init__(
        self, folder: str, entries: Mapping[str, Entry], index_name: str | None, index: Mapping[str, Any]
    ) -> None:
        self.folder, self.entries = folder, entries
        self.index_name, self.index = index_name, index
        self.flaws: list[Flaw] = []

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """Every safetensors file, by name, whether or not its header can be read."""
        names = [name for name in sorted(self.entries) if name.endswith(".safetensors")]
        return {name: self._read(self.entries[name]) for name in names}

    def _read(self, entry: Entry) -> Shard:
        if entry.is_stub:
            return Shard(entry, None)
        try:
            return Shard(entry, read_header(entry.place, entry.path))
        except FileRefused as refused:
            self.flaws.append(
                flaw(
                    "header-invalid",
                    f"{entry.path} {refused}.",
                    file=entry.path,
                    pointer=refused.pointer or (None if refused.offset is None else f"byte {refused.offset}"),
                    found={"reason": refused.code, "offset": refused.offset, "value": refused.found},
                    expected=refused.expected or "a sound header",
                )
            )
        return Shard(entry, None)

    def read_all(self) -> None:
        """Read every header, so that `flaws` has each one that cannot be."""
        _ = self.shards

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """The index's map from tensors to files; None without an index, empty when it has none."""
        if self.index_name is None:
            return None
        told = self.index.get("weight_map")
        if not isinstance(told, dict):
            return {}
        return {name: shard for name, shard in told.items() if isinstance(shard, str)}

    @property
    def index_path(self) -> str | None:
        """Path of the index in the composition."""
        if self.index_name is None:
            return None
        return f"{self.folder}/{self.index_name}" if self.folder else self.index_name

    @cached_property
    def used_files(self) -> list[str]:
        """Names of the files that an engine loads: those of the index, or all but a second set beside the first."""
        if self.weight_map is not None:
            return [name for name in self.shards if name in set(self.weight_map.values())]
        names = list(self.shards)
        plain = [name for name in names if not CONSOLIDATED.fullmatch(name) and not is_variant(name, names)]
        usual = [name for name in plain if not name.startswith("adapter_model")]
        return usual or plain or list(self.shards)

    @cached_property
    def effective(self) -> dict[str, Placed]:
        """The tensors that an engine loads; where several files hold one, the index decides."""
        found: dict[str, Placed] = {}
        if self.weight_map is not None:
            for name, shard_name in self.weight_map.items():
                placed = self.held(shard_name).get(name)
                if placed is not None:
                    found[name] = placed
            return found
        for shard_name in self.used_files:
            for name, placed in self.held(shard_name).items():
                found.setdefault(name, placed)
        return found

    def held(self, shard_name: str) -> dict[str, Placed]:
        """Return all tensors of one file."""
        if shard_name not in self._held:
            shard = self.shards.get(shard_name)
            tensors = shard.header.tensors if shard is not None and shard.header is not None else ()
            self._held[shard_name] = {one.name: Placed(one, shard.entry) for one in tensors} if shard else {}
        return self._held[shard_name]

    @cached_property
    def _held(self) -> dict[str, dict[str, Placed]]:
        return {}

    @cached_property
    def superseded(self) -> dict[str, list[str]]:
        """Tensors of files in use that the index reads from another file: name → files with the older copies."""
        found: dict[str, list[str]] = {}
        for shard_name in self.used_files:
            for name in self.held(shard_name):
                if name in self.effective and self.effective[name].entry.name != shard_name:
                    found.setdefault(name, []).append(shard_name)
        return found

    @property
    def effective_bytes(self) -> int:
        """Bytes of the tensors that an engine loads."""
        return sum(placed.size for placed in self.effective.values())

    def digest(self) -> str:
        """Return the digest of what an engine loads: names, types, shapes and bytes, wherever they lie.

        Two folders that differ only in copies that the index supersedes have the same.
        """
        hasher = hashlib.sha256()
        for name in sorted(self.effective):
            placed = self.effective[name]
            tensor = placed.tensor
            inner = hashlib.sha256()
            for chunk in _bytes_of(placed):
                inner.update(chunk)
            hasher.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{inner.hexdigest()}\n".encode())
        return f"sha256:{hasher.hexdigest()}"

    def numbering(self) -> dict[tuple[str, str, int], set[int]]:
        """Return the sets of numbered files that their names promise: (stem, rest, count) → numbers that are there."""
        sets: dict[tuple[str, str, int], set[int]] = {}
        for name in self.entries:
            match = _NUMBERED.fullmatch(name)
            if match is not None:
                key = (match["stem"], match["rest"], int(match["count"]))
                sets.setdefault(key, set()).add(int(match["number"]))
        return sets


def _bytes_of(placed: Placed) -> Iterator[bytes]:
    with placed.entry.place.open("rb") as file:
        file.seek(placed.offset)
        left = placed.size
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise OSError(None, f"{placed.entry.path} became shorter while it was read")
            left -= len(chunk)
            yield chunk


def read_bytes(placed: Placed, limit: int) -> bytes:
    """Return a tensor's first bytes, at most `limit`."""
    with placed.entry.place.open("rb") as file:
        file.seek(placed.offset)
        return file.read(min(limit, placed.size))


def sample(placed: Placed) -> bytes:
    """Return a tensor's bytes, of a large one some from its beginning, middle and end."""
    with placed.entry.place.open("rb") as file:
        found = b""
        for place in (0, placed.size // 2, max(0, placed.size - _CHUNK)):
            file.seek(placed.offset + place)
            found += file.read(min(_CHUNK, placed.size - place))
        return found


def is_zero(placed: Placed) -> bool:
    """Say whether all of a tensor's first bytes are those of zeros."""
    raw = np.frombuffer(read_bytes(placed, _ZERO_BYTES), dtype=np.uint8)
    if not raw.any():
        return placed.size > 0
    # Minus zero is zero too: only the highest bit of each number is set.
    width = max(1, placed.size // max(1, placed.tensor.values))
    return (
        width <= 8
        and not (raw[: len(raw) // width * width].reshape(-1, width)[:, -1] & 0x7F).any()
        and not raw.reshape(-1, width)[:, :-1].any()
    )


def gguf_headers(entries: Mapping[str, Entry], flaws: list[Flaw]) -> dict[str, Header]:
    """Return the headers of a folder's GGUF files by name; what cannot be read is added to `flaws`.

    A projector, which an engine reads beside the weights, is read too, and is none of them.
    """
    found: dict[str, Header] = {}
    for name in sorted(entries):
        entry = entries[name]
        role = role_of(name) if name.endswith(".gguf") and not entry.is_stub else None
        if role not in (Role.WEIGHTS, Role.PROCESSOR):
            continue
        try:
            header = read_header(entry.place, entry.path)
            found |= {name: header} if role is Role.WEIGHTS else {}
        except FileRefused as refused:
            flaws.append(
                flaw(
                    "header-invalid",
                    f"{entry.path} {refused}.",
                    file=entry.path,
                    pointer=refused.pointer or (None if refused.offset is None else f"byte {refused.offset}"),
                    found={"reason": refused.code, "offset": refused.offset, "value": refused.found},
                    expected=refused.expected or "a sound header",
                )
            )
    return found
