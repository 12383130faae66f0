"""Conditions of an act: it is done only if nothing has changed since the caller looked (`If-Match`, RFC 9110)."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import evidence
from registry.logged import Logged
from registry.tables import ReleaseRow, TargetRow
from schemas.common import format_instant
from schemas.problems import StaleEdit

ANY = "*"


def release_version(release: ReleaseRow, last: Logged | None) -> str:
    """Return what names the state of a release: its phase and how long its log is."""
    return f"{release.phase}:{last.position if last else 0}"


def require_release(session: Session, release: ReleaseRow, expected: str | None) -> None:
    """Return when a release, held by this transaction, is still as the caller saw it.

    `expected` is an If-Match header: one or more versions, quoted or not, or `*`.

    Raises:
        StaleEdit: it is not; the problem names who changed it, and what it is now.
    """
    if expected is None:
        return
    last = evidence.latest(session, evidence.release_stream(release.id))
    current = release_version(release, last)
    if not _matches(expected, current):
        raise _stale(f"release {release.id}", current, expected, last)


def require_target(session: Session, target: TargetRow, expected: str | None) -> None:
    """Return when a target, held by this transaction, is still of the generation that the caller saw.

    Raises:
        StaleEdit: as for `require_release`.
    """
    if expected is None or _matches(expected, str(target.generation)):
        return
    newest = session.scalar(
        select(ReleaseRow.id).where(ReleaseRow.target_id == target.id).order_by(ReleaseRow.id.desc()).limit(1)
    )
    streams = [f"target/{target.id}", *([evidence.release_stream(newest)] if newest else [])]
    changes = [entry for stream in streams if (entry := evidence.latest(session, stream)) is not None]
    last = max(changes, key=lambda entry: entry.sequence, default=None)
    raise _stale(f"target {target.name}", str(target.generation), expected, last)


def require(what: str, current: str, expected: str | None, last: Logged | None) -> None:
    """Return when something, held by this transaction, is still of the version that the caller saw.

    `last` is the entry of its latest change.

    Raises:
        StaleEdit: as for `require_release`.
    """
    if expected is not None and not _matches(expected, current):
        raise _stale(what, current, expected, last)


def _matches(expected: str, current: str) -> bool:
    wanted = {one.strip().strip('"') for one in expected.split(",")}
    return ANY in wanted or current in wanted


def _stale(what: str, current: str, expected: str, last: Logged | None) -> StaleEdit:
    by = f"; the latest change is {last.kind} by {last.actor} at {format_instant(last.recorded_at)}" if last else ""
    members = changed_by(last)
    return StaleEdit(f"{what} is {current} now, not {expected.strip()}{by}; look again", version=current, **members)


def changed_by(last: Logged | None) -> dict[str, str]:
    """Return the members of a problem that say who changed something last."""
    if last is None:
        return {}
    return {"changed_by": last.actor, "changed_at": format_instant(last.recorded_at), "change": last.kind}
