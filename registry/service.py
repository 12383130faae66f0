"""What every process of the service holds: settings, database, signing key and blobs. Built once, passed down."""

from dataclasses import dataclass

import structlog

from registry import db, keys
from registry.db import Database
from registry.keys import Signer
from registry.settings import Settings
from registry.storage import Blobs, opened
from schemas.problems import Unavailable

ABANDONED_SECONDS = 3600.0
"""A request's file that has not grown for an hour belongs to a process that was killed."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Service:
    """The parts that endpoints and tasks call with."""

    settings: Settings
    database: Database
    signer: Signer
    blobs: Blobs

    @classmethod
    def build(cls, settings: Settings) -> "Service":
        """Connect, load the signing key and record its public half. The database must be migrated.

        Raises:
            sqlalchemy.exc.OperationalError: the database does not answer.
            ValueError: the signing key's file does not hold such a key.
        """
        database = Database(db.connect(settings))
        signer = Signer.load(settings.signing_key)
        with database.transaction() as session:
            keys.enroll(session, signer, at=db.now(session))
        blobs = opened(settings)
        made = cls(settings, database, signer, blobs)
        made.adopt()
        try:
            made.discard_abandoned()
        except Unavailable as problem:
            # All but what needs bytes works without the store: traffic can be taken back.
            log.warning("blob_store_unavailable", error=str(problem))
        return made

    def adopt(self) -> None:
        """Record what older versions kept without an entry, once; see `registry.adoption`."""
        from registry import adoption  # it stands on this module, as does all that it needs

        adoption.adopt(self)

    def discard_abandoned(self) -> int:
        """Remove the files of requests and uploads that ended without removing them. Returns how many."""
        # An upload is given up by its row first; see `registry.uploads`.
        return self.blobs.discard_abandoned(ABANDONED_SECONDS, 2 * self.settings.upload_seconds)

    def close(self) -> None:
        """Give the connections back."""
        self.database.engine.dispose()
        self.blobs.close()
