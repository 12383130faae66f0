"""What people and pipelines work with: targets, releases, runs, evidence; projects and tokens.

What makes something takes a `key`: sent again under the same one, it is done once and answered alike (for a day,
unless the service says otherwise). Without one, each call has a key of its own, for when the connection fails.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import BinaryIO
from uuid import UUID

from gates import archive
from registry.client.transport import Transport, seen
from schemas.api import (
    Act,
    Approve,
    EndedToken,
    Erase,
    Identity,
    LimitsSet,
    Page,
    Project,
    ProjectCreate,
    ProjectUsage,
    PublicKey,
    RecordCreate,
    Registered,
    ReleaseCreate,
    Revoke,
    RollBack,
    Run,
    RunCreate,
    TargetCreate,
    Token,
    TokenCreate,
    TokenCreated,
    Withdraw,
)
from schemas.checkpoint import (
    ARCHIVE_FORMAT,
    Archived,
    ArchivedCheckpoint,
    ArchivedDocument,
    ArchivedEntry,
    ArchivedKey,
    ArchiveHead,
    Checkpoint,
)
from schemas.evidence import Entry, Kind, Recomputation, RecomputationCreate, Verification
from schemas.release import Phase, Release, ReleaseDetail, ServedAt, Target, TargetChange


class Targets:
    """Targets: served names in environments."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, body: TargetCreate, *, key: str | None = None) -> Target:
        """Make a target. Raises Conflict when the name is taken."""
        return self._transport.create(Target, "/v1/targets", body, key)

    def get(self, name: str) -> Target:
        """Return a target by its name@environment. Raises NotFound."""
        return self._transport.get(Target, f"/v1/targets/{name}")

    def list(self) -> Iterator[Target]:
        """List targets, newest first."""
        return self._transport.pages(Target, "/v1/targets")

    def history(self, name: str) -> Iterator[TargetChange]:
        """List what changed in what a target serves, newest first. Raises NotFound."""
        return self._transport.pages(TargetChange, f"/v1/targets/{name}/history")

    def served(self, name: str, at: datetime) -> ServedAt:
        """Return what a target served at an aware instant, computed from evidence. Raises NotFound, InvalidDocument."""
        return self._transport.get(ServedAt, f"/v1/targets/{name}/served", {"at": at.isoformat()})


class Releases:
    """Releases, and what people do to them. Each act's reason is kept in evidence.

    An act with `if_match`, a release's `version`, is done only when nothing has changed since: StaleEdit otherwise.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, body: ReleaseCreate, *, key: str | None = None) -> Release:
        """Start a release. Raises NotFound, ReferenceMissing, Conflict."""
        return self._transport.create(Release, "/v1/releases", body, key)

    def get(self, release: UUID) -> ReleaseDetail:
        """Return a release with its log. Raises NotFound."""
        return self._transport.get(ReleaseDetail, f"/v1/releases/{release}")

    def list(
        self, *, target: str | None = None, phases: Sequence[Phase] = (), bundle: str | None = None
    ) -> Iterator[Release]:
        """List releases, newest first, of one target, of one bundle and in some phases when they are named."""
        parameters = {"target": target, "bundle": bundle, "phase": [str(phase) for phase in phases] or None}
        return self._transport.pages(Release, "/v1/releases", parameters)

    def approve(
        self, release: UUID, reason: str, *, accept: Sequence[str] = (), if_match: str | None = None
    ) -> Release:
        """Approve a gated release, and accept its gates' warnings by their codes.

        Raises NotEligible (its `findings` are what is not accepted), TransitionRefused, NotPermitted.
        """
        body = Approve(reason=reason, accept=[*accept] or None)
        return self._act(release, "approvals", body, if_match)

    def withdraw(
        self, release: UUID, reason: str, *, approver: str | None = None, if_match: str | None = None
    ) -> Release:
        """Take back one's approval of a release without traffic; an administrator that of `approver`.

        Raises Conflict when there is none, TransitionRefused, NotPermitted.
        """
        return self._act(release, "withdrawals", Withdraw(reason=reason, approver=approver), if_match)

    def reject(self, release: UUID, reason: str, *, if_match: str | None = None) -> Release:
        """Reject a release that has no traffic yet. Raises TransitionRefused, NotPermitted."""
        return self._act(release, "rejections", reason, if_match)

    def pause(self, release: UUID, reason: str, *, if_match: str | None = None) -> Release:
        """Stop a release from moving on; its stop conditions stay armed. Raises TransitionRefused."""
        return self._act(release, "pauses", reason, if_match)

    def resume(self, release: UUID, reason: str, *, if_match: str | None = None) -> Release:
        """Let a paused or held release go on. Raises TransitionRefused, NotPermitted."""
        return self._act(release, "resumptions", reason, if_match)

    def promote(self, release: UUID, reason: str, *, if_match: str | None = None) -> Release:
        """Ask that the rest of the canary be skipped. Raises NotEligible, TransitionRefused, Conflict, NotPermitted."""
        return self._act(release, "promotions", reason, if_match)

    def roll_back(
        self, release: UUID, reason: str, *, to_nothing: bool = False, if_match: str | None = None
    ) -> Release:
        """Ask that all traffic be taken back from a release. Raises TransitionRefused, Conflict.

        `to_nothing` says that nothing shall be live next, at once, also where an earlier version could come back.
        """
        body = RollBack(reason=reason, to_nothing=to_nothing or None)
        return self._act(release, "rollbacks", body, if_match)

    def _act(self, release: UUID, act: str, said: str | Act, if_match: str | None) -> Release:
        path = f"/v1/releases/{release}/{act}"
        body = said if isinstance(said, Act) else Act(reason=said)
        return self._transport.parse(Release, self._transport.send("POST", path, body=body, headers=seen(if_match)))


class Runs:
    """Runs: one boot of one bundle with its gate results, in a release or without one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, body: RunCreate, *, key: str | None = None) -> Run:
        """Run gates on a bundle without a release. Raises NotFound, ReferenceMissing."""
        return self._transport.create(Run, "/v1/runs", body, key)

    def record(self, body: RecordCreate, *, key: str | None = None, if_match: str | None = None) -> Run:
        """Record a golden reference and set it on a target, in place of `body.expected`.

        `if_match`, the target's `generation`, does as well.

        Raises:
            NotFound, NotPermitted.
            Conflict, StaleEdit: another reference is in force, or the target has changed.
        """
        return self._transport.create(Run, "/v1/recordings", body, key, if_match=if_match)

    def get(self, run: UUID) -> Run:
        """Return a run. Raises NotFound."""
        return self._transport.get(Run, f"/v1/runs/{run}")

    def cancel(self, run: UUID, reason: str) -> Run:
        """Cancel a run that belongs to no release. Raises NotFound, TransitionRefused, NotPermitted."""
        return self._transport.post(Run, f"/v1/runs/{run}/cancellations", Act(reason=reason))

    def list(self, *, release: UUID | None = None) -> Iterator[Run]:
        """List runs, newest first, of one release when it is named."""
        return self._transport.pages(Run, "/v1/runs", {"release": str(release) if release else None})


class Evidence:
    """The log."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        stream: str | None = None,
        target: str | None = None,
        kinds: Sequence[Kind] = (),
        after: int | str | None = None,
        envelopes: bool = False,
        newest_first: bool = False,
    ) -> Iterator[Entry]:
        """List entries, oldest first.

        Args:
            stream: only of this stream, such as release/<id>.
            target: only of this target, name@environment, and its releases.
            kinds: only of these kinds.
            after: with a stream, a sequence; of all entries, a cursor, as `Client.events` gives it.
            envelopes: whether to ask for the signed envelopes too.
            newest_first: whether to go backwards; then from the newest entry, or from before `after`.
        """
        parameters: dict[str, str | list[str] | None] = {
            "stream": stream,
            "target": target,
            "kind": [str(one) for one in kinds] or None,
            "envelopes": "true" if envelopes else None,
            "newest_first": "true" if newest_first else None,
        }
        start = None if after is None else str(after)
        return self._transport.pages(Entry, "/v1/evidence", parameters, cursor="after", start=start)

    def verify(self, *, stream: str | None = None, checkpoint: str | None = None) -> Verification:
        """Have chains, signatures, checkpoints and phases recomputed from what is stored.

        Args:
            stream: only this one.
            checkpoint: digest of one that was kept: it must still be there.
        """
        path = "/v1/evidence/verifications"
        asked = {"stream": stream, "checkpoint": checkpoint}
        answer = self._transport.send("POST", path, parameters=asked, is_slow=True)
        return self._transport.parse(Verification, answer)

    def recompute(self, entry_digest: str) -> Recomputation:
        """Have a gate's verdict computed again from its records. Raises NotFound, InvalidDocument."""
        body = RecomputationCreate(entry_digest=entry_digest)
        answer = self._transport.send("POST", "/v1/evidence/recomputations", body=body, is_slow=True)
        return self._transport.parse(Recomputation, answer)

    def checkpoint(self) -> Checkpoint:
        """Seal everything recorded until now; the last checkpoint when nothing is new. Raises NotFound."""
        return self._transport.post(Checkpoint, "/v1/evidence/checkpoints", is_slow=True)

    def checkpoints(self, *, after: int = 0, envelopes: bool = False) -> Iterator[Checkpoint]:
        """List checkpoints, oldest first, after a number."""
        parameters = {"envelopes": "true" if envelopes else None}
        path = "/v1/evidence/checkpoints"
        return self._transport.pages(Checkpoint, path, parameters, cursor="after", start=str(after))

    def revoke(self, entry: str, reason: str) -> Entry:
        """Let a gate result count no more. Asking twice changes nothing. Raises NotFound, Conflict, NotPermitted."""
        return self._transport.post(Entry, "/v1/evidence/revocations", Revoke(entry=entry, reason=reason))

    def erase(self, entry: str, reason: str) -> Entry:
        """Erase the raw records of a gate's result; the result stands. Asking twice changes nothing.

        Raises:
            NotFound, NotPermitted, InvalidDocument: the entry has no records.
            Conflict: a bundle is made of the same bytes.
        """
        return self._transport.post(Entry, "/v1/evidence/erasures", Erase(entry=entry, reason=reason))

    def export(self, file: BinaryIO) -> Archived:
        """Seal the log, then write it to a file: entries, checkpoints, public keys, and the documents they name.

        `gates.archive.verify` reads such a file without any service.

        Raises:
            NotFound: there is no evidence yet.
        """
        last = self.checkpoint()
        writer = archive.Writer(file)
        writer.write(ArchiveHead(format=ARCHIVE_FORMAT, project=last.project, name=self._project_name()))
        keys = self.public_keys()
        for key in keys:
            writer.write(ArchivedKey(**key.model_dump()))
        for checkpoint in self.checkpoints(envelopes=True):
            if checkpoint.number <= last.number and checkpoint.envelope is not None:
                writer.write(ArchivedCheckpoint(envelope=checkpoint.envelope))
        entries, bound = self._export_entries(writer, last.number)
        for digest, kind in sorted(bound.items()):
            place = {"policy": "policies"}.get(kind, f"{kind}s")
            stored = self._transport.get(Registered, f"/v1/{place}/{digest}")
            writer.write(ArchivedDocument(digest=digest, document=dict(stored.document or {})))
        writer.end()
        return Archived(
            entries=entries,
            checkpoints=last.number,
            documents=len(bound),
            keys=len(keys),
            checkpoint=last.digest,
            size=writer.size,
        )

    def _project_name(self) -> str:
        return self._transport.get(Identity, "/v1/me").project

    def _export_entries(self, writer: archive.Writer, checkpoints: int) -> tuple[int, dict[str, str]]:
        """Write what the checkpoints sealed, and return how many entries there are and the documents they name."""
        count, bound = 0, dict[str, str]()
        for number in range(1, checkpoints + 1):
            for entry in self._transport.get(Page[Entry], f"/v1/evidence/checkpoints/{number}/entries").items:
                writer.write(ArchivedEntry(**entry.model_dump(include=set(ArchivedEntry.model_fields))))
                count += 1
                if (document := archive.bound_document(entry.kind, entry.body)) is not None:
                    bound[document[1]] = document[0]
        return count, bound

    def public_keys(self) -> Sequence[PublicKey]:
        """Return every public key that signed evidence, oldest first."""
        return self._transport.get(Page[PublicKey], "/v1/keys").items


class Projects:
    """Projects; for administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, body: ProjectCreate) -> Project:
        """Make a project. Raises Conflict, NotPermitted."""
        return self._transport.post(Project, "/v1/projects", body)

    def get(self, name: str) -> ProjectUsage:
        """Return what a project holds, and how much it may. Raises NotFound."""
        return self._transport.get(ProjectUsage, f"/v1/projects/{name}")

    def set_limits(self, name: str, body: LimitsSet, *, if_match: str | None = None) -> ProjectUsage:
        """Set the limits of a project that `body` was made with, also with None.

        Raises:
            StaleEdit: it is of another `generation` than `if_match`.
            NotFound, NotPermitted.
        """
        named = body.model_dump_json(exclude_unset=True).encode()
        return self._transport.post(ProjectUsage, f"/v1/projects/{name}/limits", named, if_match=if_match)

    def list(self) -> Iterator[Project]:
        """List the projects that the caller administers."""
        return self._transport.pages(Project, "/v1/projects")


class Tokens:
    """Tokens; for administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, body: TokenCreate, *, key: str | None = None) -> TokenCreated:
        """Make a token; the answer is the only place that has its secret. Raises Conflict, NotPermitted."""
        return self._transport.create(TokenCreated, "/v1/tokens", body, key)

    def list(self, project: str | None = None) -> Iterator[Token]:
        """List tokens, newest first, without their secrets, of the caller's own project or of another one."""
        return self._transport.pages(Token, "/v1/tokens", {"project": project})

    def revoke(self, token: UUID, reason: str) -> EndedToken:
        """End a token now; `made` says which ones it made that count on.

        Raises:
            NotFound, NotPermitted; Conflict for the last administrator's.
        """
        return self._transport.post(EndedToken, f"/v1/tokens/{token}/revocations", Act(reason=reason))
