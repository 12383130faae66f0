"""Rotation of the signing key: `python -m registry.keys rotate --reason WHY`, by the operator of the service.

The old key signs an entry in every project that names the new one, and ends. Processes that run take the new key at
their next signature. Settings come from the environment; the database's address must be that of the tables' owner,
since only the owner may end a key. What a crash left half done is finished by the same command.
"""

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.orm import Session

from registry import db, evidence, keys
from registry.db import Database
from registry.keys import Signer
from registry.settings import Settings, explain
from registry.tables import ProjectRow, SigningKeyRow
from schemas.evidence import KeyRotated, Kind
from schemas.problems import Conflict, Problem

OVERLAP_SECONDS = 60.0
"""How long what the old key has signed already may still be recorded."""


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m registry.keys", description="Signing keys of the service.")
    rotating = parser.add_subparsers(required=True, metavar="rotate").add_parser(
        "rotate", help="put a new key in place"
    )
    rotating.add_argument("--reason", required=True, help="why; kept in evidence")
    rotating.add_argument("--overlap-seconds", type=float, default=OVERLAP_SECONDS, help="the old key ends after these")
    chosen = parser.parse_args(arguments)
    try:
        settings = Settings()
    except ValidationError as error:
        sys.stderr.write(f"settings: {explain(error)}\n")
        return 2
    database = Database(db.connect(settings))
    try:
        new = rotate(database, settings.signing_key, reason=chosen.reason, overlap_seconds=chosen.overlap_seconds)
    except ProgrammingError as error:
        sys.stderr.write(f"rotate: the database refuses; is this its owner? {str(error.orig).splitlines()[0]}\n")
        return 4
    except DBAPIError as error:
        if not db.is_away(error):
            raise
        sys.stderr.write(f"rotate: the database cannot do it just now: {str(error.orig).splitlines()[0]}\n")
        return 4
    except (Problem, OSError, ValueError) as error:
        sys.stderr.write(f"rotate: {error}\n")
        return 2
    finally:
        database.engine.dispose()
    sys.stdout.write(f"key {new} signs from now on\n")
    return 0


def rotate(database: Database, path: Path, *, reason: str, overlap_seconds: float) -> str:
    """Put a new key in a file's place. Returns the new key's id.

    Raises:
        FileNotFoundError: there is no key to take the place of.
        Conflict: somebody rotates it just now.
        ValueError: the file holds none, or its key has ended already.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no signing key at {path}")
    with _alone(path.parent):
        old, following = Signer.load(path), path.with_name(f"{path.name}.next")
        new = _begun(database, following)
        if new is None:
            following.unlink(missing_ok=True)
            new = Signer.load(following)
            with database.transaction() as session:
                _record(session, old, new, reason=reason, overlap_seconds=overlap_seconds)
        following.replace(path)
        keys.settle(path.parent)
        return new.key_id


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from rotating the key in a folder: of two at once, one would lose the key that the other recorded.

    Raises:
        Conflict: somebody rotates it just now.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another rotation of the key in {folder} is under way") from None
        yield
    finally:
        os.close(handle)


def _begun(database: Database, following: Path) -> Signer | None:
    """Return the key of a rotation that was recorded and never finished."""
    if not following.exists():
        return None
    left = Signer.load(following)
    with database.transaction() as session:
        return left if session.get(SigningKeyRow, left.key_id) is not None else None


def _record(session: Session, old: Signer, new: Signer, *, reason: str, overlap_seconds: float) -> None:
    # Whoever makes a project meanwhile waits, and then sees that the old key ends: see `registry.projects`.
    session.execute(text("LOCK TABLE projects IN SHARE MODE"))
    keys.enroll(session, old, at=db.now(session))
    at = keys.signing_time(session, old.key_id)
    keys.enroll(session, new, at=at)
    until = at + timedelta(seconds=overlap_seconds)
    body = KeyRotated(
        key_id=new.key_id,
        public_key_pem=new.public_key_pem,
        valid_from=at,
        retired=old.key_id,
        valid_until=until,
        reason=reason,
    )
    agreed = new.sign(body.payload()).signatures[0].sig
    body = body.model_copy(update={"countersigned": agreed})
    for project in session.scalars(select(ProjectRow.id).order_by(ProjectRow.id)):
        signed = evidence.state(
            old,
            f"project/{project}",
            f"key:{new.key_id}",
            "operator",
            Kind.KEY_ROTATED,
            body,
            subjects={"key": f"sha256:{new.key_id}"},
            now=at,
        )
        evidence.append(session, project, signed)
    ended = session.scalar(
        update(SigningKeyRow)
        .where(SigningKeyRow.key_id == old.key_id, SigningKeyRow.valid_until.is_(None))
        .values(valid_until=until)
        .returning(SigningKeyRow.key_id)
    )
    if db.now(session) >= until:
        raise ValueError(f"recording it took longer than the {overlap_seconds:g} s in which the old key still signs")
    if ended is None:
        raise ValueError("the key in the file has ended already; restore the one that signs, or start with a new file")
