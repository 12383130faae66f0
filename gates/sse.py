"""Server-sent events, cut into pieces anywhere. Pure.

Source: WHATWG HTML, section 9.2.6; the `error:` field is llama.cpp's.
"""

from dataclasses import dataclass, field


class NotUtf8(ValueError):
    """A line of the stream is not UTF-8."""


@dataclass(frozen=True)
class Event:
    """One dispatched event: its name ("" for the default), its data lines joined by LF, and the last id before it."""

    name: str
    data: str
    id: str = ""


@dataclass
class EventParser:
    """Turns the bytes of a stream into events, the same however the bytes were cut.

    Lines end in LF, CR or CRLF; lines that start with a colon are comments; an event without data is dropped, as
    is one that the end of the stream interrupts.
    """

    comments: int = 0
    last_id: str = ""
    """Where the stream is read on from: the latest id, of an event or of a block without data."""
    _id: str = ""
    _buffer: bytearray = field(default_factory=bytearray)
    _name: str = ""
    _data: list[str] = field(default_factory=list)
    _after_return: bool = False
    _started: bool = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes and return the events that they complete. Raises NotUtf8."""
        events = []
        for line in self._lines(chunk):
            if line:
                self._field(line)
                continue
            self.last_id = self._id
            if self._data:
                events.append(Event(self._name, "\n".join(self._data), self.last_id))
            self._name, self._data = "", []
        return events

    @property
    def is_between_events(self) -> bool:
        """Whether nothing is left over: the stream may end here without losing anything."""
        return not self._buffer and not self._data and not self._name

    def _lines(self, chunk: bytes) -> list[bytes]:
        if self._after_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        self._buffer += chunk
        if not self._buffer:
            return []
        # A CR at the end may be half of a CRLF. It ends its line now; an LF that follows belongs to it.
        self._after_return = self._buffer.endswith(b"\r")
        normal = bytes(self._buffer).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = normal.split(b"\n")
        self._buffer = bytearray(rest)
        return lines

    def _field(self, raw: bytes) -> None:
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotUtf8(f"a line is not UTF-8 at byte {error.start}") from None
        if not self._started:
            line = line.removeprefix("\ufeff")
            self._started = True
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                self.comments += 1
            case "data":
                self._data.append(value)
            case "event":
                self._name = value
            case "error":
                self._name, self._data = "error", [*self._data, value]
            case "id" if "\0" not in value:
                self._id = value
            case _:  # retry and unknown fields mean nothing here
                pass
