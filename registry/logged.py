"""An entry of the log as it was written, from wherever it was read. It never changes."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID


class Logged(Protocol):
    """What an entry tells, whether its row was read as an object, as a plain row, or has just been written."""

    @property
    def sequence(self) -> int:
        """Place among all entries of the database, from 1, with gaps."""

    @property
    def id(self) -> UUID:
        """Identity of its own."""

    @property
    def project_id(self) -> UUID:
        """Project that it belongs to."""

    @property
    def stream(self) -> str:
        """What it is about, such as `release/ID`."""

    @property
    def position(self) -> int:
        """Place in its stream, from 1, without gaps."""

    @property
    def act(self) -> str:
        """Name of the act; a stream has each once."""

    @property
    def kind(self) -> str:
        """One of `schemas.evidence.Kind`."""

    @property
    def actor(self) -> str:
        """Who did it."""

    @property
    def recorded_at(self) -> datetime:
        """When, by the database's clock."""

    @property
    def envelope(self) -> bytes:
        """Canonical JSON of the DSSE envelope."""

    @property
    def previous(self) -> str:
        """Digest of the entry before it in its stream."""

    @property
    def entry_digest(self) -> str:
        """Digest of its link: see `gates.evidence.Record.link`."""

    @property
    def key_id(self) -> str:
        """Key that signed."""

    @property
    def transaction_id(self) -> int:
        """Transaction that wrote it, or a later one: see `registry.cursors`."""


@dataclass(slots=True)
class Written:
    """An entry on its way into the log: it gets its digest, and then its sequence."""

    id: UUID
    project_id: UUID
    stream: str
    position: int
    act: str
    kind: str
    actor: str
    recorded_at: datetime
    envelope: bytes
    previous: str
    key_id: str
    transaction_id: int
    entry_digest: str = ""
    sequence: int = 0
