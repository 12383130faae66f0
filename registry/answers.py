"""Answers that are given again: a request that carries an Idempotency-Key is done once, however often it is sent.

The answer is kept in the transaction that does what was asked, so there is one exactly when it was done. It is
sealed with a key that is derived from the caller's own token: the database can read neither it nor, for a new
token, the secret in it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry import db
from registry.auth import Actor
from registry.tables import AnswerRow
from schemas.problems import KeyReused, Unavailable

NONCE_BYTES = 12
CLEANED_AT_ONCE = 100
SHOWN_CHARACTERS = 120

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request with its key."""

    key: str
    """As the caller chose it."""
    secret: str
    """The caller's bearer token."""
    request: str
    """Method and path."""
    body: BaseModel
    """What was asked."""
    seconds: float
    """How long its answer is kept."""


def give(
    session: Session, actor: Actor, asked: Asked, model: type[ModelT], make: Callable[[], ModelT]
) -> tuple[ModelT, bool]:
    """Return what `make` returns, or what it returned when this caller sent the same under the same key.

    Of two at once, the second waits for the first. What was refused leaves no answer, and may be tried again.

    Returns:
        The answer, and whether it is one from before.

    Raises:
        KeyReused: the caller used the key for something else; `errors` names each difference.
    """
    identity = hashlib.sha256(f"{actor.token}\n{asked.key}".encode()).hexdigest()
    now = db.now(session)
    _clean(session, identity, now)
    added = session.execute(
        insert(AnswerRow)
        .values(id=identity, sealed=b"", created_at=now, expires_at=now + timedelta(seconds=asked.seconds))
        .on_conflict_do_nothing(index_elements=["id"])
        .returning(AnswerRow.id)
    ).first()
    box = _Box(asked.secret, identity)
    body = asked.body.model_dump(mode="json", by_alias=True)
    if added is None:
        row = session.get(AnswerRow, identity, populate_existing=True)
        if row is None:
            raise Unavailable("the answer under this Idempotency-Key has just ended; try again")
        kept = box.open(row.sealed)
        _same(asked, body, kept)
        return model.model_validate(kept["answer"]), True
    made = make()
    row = session.get_one(AnswerRow, identity)
    row.sealed = box.seal(
        {"request": asked.request, "body": body, "answer": made.model_dump(mode="json", by_alias=True)}
    )
    session.flush()
    return made, False


def _clean(session: Session, identity: str, now: datetime) -> None:
    """Remove this key's answer when it has ended, and some others that have: nobody else has to come by."""
    ended = (
        select(AnswerRow.id)
        .where(AnswerRow.expires_at <= now)
        .order_by(AnswerRow.expires_at)
        .limit(CLEANED_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    session.execute(delete(AnswerRow).where(AnswerRow.id == identity, AnswerRow.expires_at <= now))
    session.execute(delete(AnswerRow).where(AnswerRow.id.in_(ended.scalar_subquery())))


class _Box:
    """Seals JSON so that only who holds the token can open it."""

    def __init__(self, secret: str, identity: str) -> None:
        derived = HKDF(hashes.SHA256(), 32, salt=None, info=f"sluicegate answer {identity}".encode())
        self._cipher = AESGCM(derived.derive(secret.encode()))

    def seal(self, value: dict[str, Any]) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, json.dumps(value).encode(), None)

    def open(self, sealed: bytes) -> dict[str, Any]:
        opened: dict[str, Any] = json.loads(self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None))
        return opened


def _same(asked: Asked, body: dict[str, Any], kept: dict[str, Any]) -> None:
    if kept["request"] != asked.request:
        raise KeyReused(
            f"the Idempotency-Key {asked.key} was used for {kept['request']}; take a new one for {asked.request}",
            request=kept["request"],
        )
    before = kept["body"]
    errors = [
        {"pointer": f"/{name}", "detail": f"was {_shown(before.get(name))} under this key"}
        for name in sorted(body.keys() | before.keys())
        if body.get(name) != before.get(name)
    ]
    if errors:
        places = ", ".join(error["pointer"] for error in errors)
        raise KeyReused(
            f"the Idempotency-Key {asked.key} was used with another body, with another {places}; take a new key",
            errors=errors,
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
