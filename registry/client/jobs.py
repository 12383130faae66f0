"""A runner's side: it says who it is, takes jobs, and reports under the fencing token of its lease."""

from collections.abc import Iterator
from urllib.parse import quote
from uuid import UUID

from registry.client.transport import Transport, seen
from schemas.api import Complete, Progress, Reported, Run, RunnerDetail, RunnerDrain
from schemas.runner import Claim, Renewal, Report, Runner, RunnerRegistration


class Runners:
    """Runners."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> Iterator[Runner]:
        """List runners, newest first."""
        return self._transport.pages(Runner, "/v1/runners")

    def get(self, runner: UUID | str) -> RunnerDetail:
        """Return a runner by its identity or its name, with its newest runs. Raises NotFound."""
        return self._transport.get(RunnerDetail, f"/v1/runners/{quote(str(runner), safe='')}")

    def register(self, body: RunnerRegistration) -> Runner:
        """Say who a runner is; repeating it refreshes what is known. Raises Conflict: another machine has the name."""
        return self._transport.post(Runner, "/v1/runners", body)

    def heartbeat(self, runner: UUID, *, disk_free_bytes: int | None = None, boot_id: str | None = None) -> Runner:
        """Say that a runner lives, and how much disk it has left.

        Raises:
            NotFound.
            Conflict: the runner is another machine than the one whose boot this is.
        """
        parameters = {"disk_free_bytes": disk_free_bytes, "boot_id": boot_id}
        answer = self._transport.send("POST", f"/v1/runners/{runner}/heartbeats", parameters=parameters)
        return self._transport.parse(Runner, answer)

    def drain(
        self, runner: UUID | str, reason: str, *, force_in_seconds: int | None = None, if_match: str | None = None
    ) -> Runner:
        """Have a runner take no job any more; `drain` says what it still holds.

        Args:
            runner: by name or identity.
            reason: why.
            force_in_seconds: after so long what it still holds is ended; `loses` of `get` says what that loses.
            if_match: its `generation` that was seen: nothing is done when it has changed since.

        Raises:
            Conflict: somebody else drains it, and `if_match` does not say that this was seen.
            NotFound, StaleEdit, NotPermitted.
        """
        return self._transport.post(
            Runner,
            f"/v1/runners/{quote(str(runner), safe='')}/drains",
            RunnerDrain(reason=reason, force_in_seconds=force_in_seconds),
            if_match=if_match,
        )

    def undrain(self, runner: UUID | str, reason: str | None = None, *, if_match: str | None = None) -> Runner:
        """Let a runner take jobs again; `reason` is shown with it. Raises NotFound, StaleEdit, NotPermitted."""
        path = f"/v1/runners/{quote(str(runner), safe='')}/drains"
        answer = self._transport.send("DELETE", path, parameters={"reason": reason}, headers=seen(if_match))
        return self._transport.parse(Runner, answer)

    def claim(self, runner: UUID, *, boot_id: str | None = None) -> Claim | None:
        """Take the oldest job that this runner may do, or None. Raises NotFound, and Conflict as `heartbeat` does."""
        answer = self._transport.send("POST", f"/v1/runners/{runner}/claims", parameters={"boot_id": boot_id})
        return None if answer.status_code == 204 else self._transport.parse(Claim, answer)


class Jobs:
    """Jobs that a runner holds. LeaseLost means: stop, and do not report again."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def renew(self, job: UUID, body: Progress) -> Renewal:
        """Extend the lease, and learn whether the job is still wanted. Raises LeaseLost, NotFound."""
        return self._transport.post(Renewal, f"/v1/jobs/{job}/renewals", body)

    def report(self, job: UUID, body: Report) -> Reported:
        """Record what happened; a repeated act answers with the entry that stands. Raises LeaseLost, NotFound."""
        return self._transport.post(Reported, f"/v1/jobs/{job}/reports", body)

    def complete(self, job: UUID, body: Complete) -> None:
        """End a job, or put it back after a technical problem. Raises LeaseLost, NotFound."""
        self._transport.send("POST", f"/v1/jobs/{job}/completions", body=body)

    def put_records(self, job: UUID, digest: str, raw: bytes, *, fencing_token: int) -> None:
        """Send the raw records of a gate. Raises LeaseLost, DigestMismatch, TooLarge."""
        path, parameters = f"/v1/jobs/{job}/records/{digest}", {"fencing_token": fencing_token}
        headers = {"content-type": "application/octet-stream"}
        self._transport.send("PUT", path, parameters=parameters, body=raw, headers=headers, is_slow=True)

    def post_reference(self, job: UUID, raw: bytes, *, fencing_token: int) -> Run:
        """Store the reference that a recording made and put it in force. Raises LeaseLost, InvalidDocument."""
        parameters = {"fencing_token": fencing_token}
        answer = self._transport.send("POST", f"/v1/jobs/{job}/references", parameters=parameters, body=raw)
        return self._transport.parse(Run, answer)
