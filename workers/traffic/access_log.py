"""Reads Envoy's access log line by line as it grows, across rotations, at the cost of the new bytes only."""

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from gates.tally import LogRecord

MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
DISORDER_SECONDS: Final = 5.0
"""How far two lines of the log may be out of order."""
MAX_LINE_BYTES: Final = 64 * 1024
"""A longer line is garbled: Envoy limits a request's headers to 60 KiB, and no field but the path is the client's."""


@dataclass(frozen=True, slots=True)
class LogBatch:
    """What was read in one go.

    Args:
        records: in the order of the log, which is the order in which requests ended.
        garbled: lines that are no record.
        is_lost: True when lines before this batch are gone: the file was cut, or rotated out of sight.
        until: where to go on; opaque.
        is_more: True when the batch was cut at its size and more is there.
    """

    records: tuple[LogRecord, ...]
    garbled: int
    is_lost: bool
    until: str
    is_more: bool


class AccessLog:
    """An access log and its rotated predecessors, `access.jsonl` and `access.jsonl.*` beside it.

    Args:
        path: of the file that Envoy writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self) -> str:
        """Return the position after the last whole line, so that only later lines are read."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                inode = os.fstat(file.fileno()).st_ino
                start = max(0, size - MAX_LINE_BYTES)
                file.seek(start)
                tail = file.read(size - start)
        except FileNotFoundError:
            return ""
        newline = tail.rfind(b"\n")
        return _position(inode, start + newline + 1 if newline >= 0 else start)

    def position_at(self, instant: datetime) -> str:
        """Return a position before every line of a request that ended at an instant or later.

        For a reader that lost its position: the cost grows with the logarithm of the log. Lines of several threads
        are a little out of order, so it goes back a little further.
        """
        wanted = instant - timedelta(seconds=DISORDER_SECONDS)
        chosen = None
        for inode, path in self._inodes():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                first = _ended_at(file, 0)
                if chosen is None or (first is not None and first < wanted):
                    chosen = _position(inode, _search(file, wanted))
        return chosen or ""

    def read(self, since: str, *, max_bytes: int = MAX_BATCH_BYTES) -> LogBatch:
        """Read the whole lines after a position.

        Args:
            since: `until` of the batch before, or `end()`; `""` for the start of the present file.
            max_bytes: where to cut a large batch.

        Raises:
            ValueError: not a position.
        """
        inode, offset = _parse(since)
        # Asked before the rotated file is read to its end: once the present file is there, Envoy writes only to it.
        following = self._following(inode)
        path = self._find(inode)
        if path is None:
            is_lost = inode != 0
            return LogBatch((), 0, is_lost, "" if is_lost else since, is_more=False)
        try:
            file = path.open("rb")
        except FileNotFoundError:  # renamed between looking and opening: the next call finds it
            return LogBatch((), 0, is_lost=False, until=since, is_more=True)
        with file:
            status = os.fstat(file.fileno())
            is_lost = inode not in {0, status.st_ino} or offset > status.st_size
            offset = 0 if is_lost else offset
            file.seek(offset)
            data = file.read(max_bytes)
        records, garbled, used = _parse_lines(data)
        if used == 0 and len(data) >= min(max_bytes, MAX_LINE_BYTES):
            garbled, used = 1, len(data)  # no end of line in sight: skip what no record can be
        is_more = used > 0 and offset + used < status.st_size
        until = _position(status.st_ino, offset + used)
        if not is_more and following is not None and status.st_ino == inode:
            cut = offset + used < status.st_size  # a rotated file that ends inside a line will never end it
            return LogBatch(records, garbled + cut, is_lost, _position(following, 0), is_more=True)
        return LogBatch(records, garbled, is_lost, until, is_more)

    def rotated(self) -> list[Path]:
        """Return the log's old files, oldest first. A rotated file's suffix is a number that grows."""
        found = [each for each in self.path.parent.glob(self.path.name + ".*") if each.suffix[1:].isdecimal()]
        return sorted(found, key=lambda each: int(each.suffix[1:]))

    def _inodes(self) -> list[tuple[int, Path]]:
        found = []
        for path in [*self.rotated(), self.path]:
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_ino, path))
        return found

    def _find(self, inode: int) -> Path | None:
        """Return the file with that inode, else the oldest one that is left, else None."""
        files = self._inodes()
        if inode == 0:
            return self.path if files and files[-1][1] == self.path else None
        return next((path for each, path in files if each == inode), files[0][1] if files else None)

    def _following(self, inode: int) -> int | None:
        """Return the inode of the file that follows a rotated one; None for the present file."""
        inodes = [each for each, _ in self._inodes()]
        if inode not in inodes[:-1]:
            return None
        return inodes[inodes.index(inode) + 1]


def _search(file: BinaryIO, wanted: datetime) -> int:
    """Return the start of a line before which every line ended before an instant."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > MAX_LINE_BYTES:
        middle = (low + high) // 2
        ended_at = _ended_at(file, middle)
        low, high = (middle, high) if ended_at is not None and ended_at < wanted else (low, middle)
    if low == 0:
        return 0
    file.seek(low)
    return low + len(file.readline())


def _ended_at(file: BinaryIO, offset: int) -> datetime | None:
    """Return when the first readable whole line at or after an offset ended."""
    file.seek(offset)
    if offset:
        file.readline()
    for line in file:
        with contextlib.suppress(ValueError):
            return parse_line(line).ended_at
    return None


def _position(inode: int, offset: int) -> str:
    return f"{inode}:{offset}"


def _parse(position: str) -> tuple[int, int]:
    if not position:
        return 0, 0
    inode, _, offset = position.partition(":")
    if not (inode.isdecimal() and offset.isdecimal()):
        raise ValueError(f"not a position in an access log: {position!r}")
    return int(inode), int(offset)


def _parse_lines(data: bytes) -> tuple[tuple[LogRecord, ...], int, int]:
    """Return records, garbled lines, and the bytes used: up to and with the last newline."""
    used = data.rfind(b"\n") + 1
    found, garbled = [], 0
    for line in data[:used].split(b"\n")[:-1]:
        try:
            found.append(parse_line(line))
        except ValueError:
            garbled += 1
    return tuple(found), garbled, used


def parse_line(line: bytes) -> LogRecord:
    """Return the record that a line of the log is.

    Raises:
        ValueError: not JSON, or a field is missing or of the wrong type.
    """
    fields = json.loads(line)
    try:
        return _record(fields)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not an access-log record: {error!r}") from error


def _record(fields: dict[str, Any]) -> LogRecord:
    flags = _text(fields["flags"]) or "-"
    revision = _text(fields["rev"])
    ttft_us = _number(fields["ttft_us"])
    duration_ms = _number(fields["duration_ms"])
    return LogRecord(
        at=_instant(_text(fields["ts"]) or ""),
        target=_text(fields["target"]),
        route=_text(fields["route"]),
        revision=int(revision) if revision is not None else None,
        method=_text(fields["method"]),
        assigned=_text(fields["assigned"]),
        served=_text(fields["served"]),
        code=int(_number(fields["code"]) or 0),
        flags=frozenset() if flags == "-" else frozenset(flags.split(",")),
        details=_text(fields["details"]) or "",
        attempts=int(_number(fields["attempts"]) or 0),
        ttft_ms=None if ttft_us is None else ttft_us / 1000,
        duration_ms=duration_ms or 0.0,
        is_event_stream=(_text(fields["type"]) or "").partition(";")[0].strip().lower() == "text/event-stream",
        request_id=_text(fields.get("rid")),
    )


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is not text")


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise TypeError(f"{value!r} is not a count")
    return float(value)


def _instant(text: str) -> datetime:
    """Return `seconds.microseconds` since 1970 as an instant, without the rounding of a float."""
    seconds, _, micros = text.partition(".")
    if not (seconds.isdecimal() and micros.isdecimal() and len(micros) == 6):
        raise ValueError(f"not an instant: {text!r}")
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros))
