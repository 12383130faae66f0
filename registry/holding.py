"""Locking a release for a person's act, in one statement where nothing is wrong."""

from uuid import UUID

from sqlalchemy import bindparam, func, select, true
from sqlalchemy.orm import Session

from registry import acts, auth, evidence
from registry.auth import Actor
from registry.tables import ReleaseRow, TargetRow, TokenRow
from schemas.problems import NotFound, TransitionRefused

MOST_TO_REPEAT = 1000
"""Entries of a release below which it may be paused or approved: what is paused always has room to be resumed."""
MOST_TO_RESUME = 2000
"""And resumed, before it is live."""
_TARGET = "target_of_the_act"


def take(session: Session, actor: Actor, release: UUID) -> ReleaseRow:
    """Return a release of the actor's project, locked for the rest of the transaction, as is the actor's token.

    Raises:
        NotFound: the project has no such release.
        NotPermitted: the token is for other targets.
        Unauthenticated: the token counts no more.
    """
    if actor.token is not None and (row := _at_once(session, actor, actor.token, release)) is not None:
        return row
    joined = select(ReleaseRow, TargetRow).join(TargetRow, TargetRow.id == ReleaseRow.target_id)
    found = session.execute(joined.where(ReleaseRow.id == release)).one_or_none()
    if found is None or found[0].project_id != actor.project_id:
        raise NotFound(f"there is no release {release}")
    auth.require_target(actor, found[1].name)
    # The session keeps only what somebody holds, and the act and its answer name the target again.
    session.info[_TARGET] = found[1]
    auth.confirm(session, actor)
    return evidence.hold(session, release)


def require_room(release: ReleaseRow, most: int) -> None:
    """Return when a release's log has room for what may be done any number of times. Raises TransitionRefused.

    Who shows a release and who acts on it reads the log whole. What ends a release is never refused for that.
    """
    if release.entries >= most:
        raise TransitionRefused(
            f"the log of release {release.id} has {release.entries} entries, and this may be done below {most}: "
            "reject the release, or take its traffic back, and make a new one of the bundle",
            phase=release.phase,
            limit=most,
        )


def _at_once(session: Session, actor: Actor, token: UUID, release: UUID) -> ReleaseRow | None:
    """Hold a release and a token in one statement. None, with nothing held, where the actor has no such release."""
    query = _OF_ANY if actor.targets is None else _OF_SOME
    asked = {"release": release, "project": actor.project_id, "token": token, "targets": sorted(actor.targets or ())}
    found = session.execute(query, asked).one_or_none()
    if found is None:
        return None
    row: ReleaseRow = found[0]
    _, target, revoked_at, expires_at, now = found
    auth.require_counting(revoked_at, expires_at, now)
    session.info[_TARGET] = target
    evidence.note_held(session, row)
    acts.note_moment(session, now)
    return row


_TOKEN = (
    select(TokenRow.revoked_at, TokenRow.expires_at)
    .where(TokenRow.id == bindparam("token"))
    .with_for_update(read=True)
    .cte("token")
)
_OF_ANY = (
    select(ReleaseRow, TargetRow, _TOKEN.c.revoked_at, _TOKEN.c.expires_at, func.clock_timestamp())
    .join(TargetRow, TargetRow.id == ReleaseRow.target_id)
    .join(_TOKEN, true())
    .where(ReleaseRow.id == bindparam("release"), ReleaseRow.project_id == bindparam("project"))
    .with_for_update(key_share=True, of=ReleaseRow)
    .execution_options(populate_existing=True)
)
_OF_SOME = _OF_ANY.where(TargetRow.name.in_(bindparam("targets", expanding=True)))
