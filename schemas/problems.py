"""Problems: every way the service says no, as RFC 9457 problem types.

A class is a type: its docstring and its advice are the page behind the type URI. `detail` says what happened and what
to do.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self


class Problem(Exception):
    """Something was refused or did not work."""

    kind: ClassVar[str] = "problem"
    title: ClassVar[str] = "Problem"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    advice: ClassVar[str] = ""
    """What to do about it, in one sentence; code between backticks."""

    def __init__(self, detail: str, **members: Any) -> None:
        """Make a problem. `members` become extension members of the body."""
        super().__init__(detail)
        self.detail = detail
        self.members = members

    def body(self, base_url: str = "") -> dict[str, Any]:
        """Return the RFC 9457 body."""
        return {
            "type": f"{base_url}/problems/{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }


class InvalidDocument(Problem):
    """The document or request is not what the schema says. `errors` lists each place by JSON Pointer."""

    kind, title, status = "invalid-document", "Invalid document", 422
    advice = (
        "Change each place that `errors` names, and send it again. `schemas/generated/` has the JSON "
        "Schema of each document."
    )


class DigestMismatch(Problem):
    """The bytes received, or those in the store, do not have the digest that the request names. Nothing was stored."""

    kind, title, status = "digest-mismatch", "Digest mismatch", 422
    advice = "Send the file again; if it fails again, hash it where it lies: it is not the one that the document names."


class BlobsMissing(Problem):
    """The bundle names files that have not been uploaded to this project. `missing` lists them."""

    kind, title, status = "blobs-missing", "Blobs missing", 422
    advice = "Send the files of `missing`; `sluicegate bundle create` does so by itself."


class SuiteMissing(Problem):
    """The policy names suites that are not registered in this project. `suites` lists them; push them first."""

    kind, title, status = "suite-missing", "Suite missing", 422
    advice = "Push each suite of `suites` with `sluicegate suite push FILE`, then the policy."

    @classmethod
    def at(cls, lacking: Sequence[tuple[int, str]]) -> Self:
        """Return the problem of a policy that names these suites, each with the number of its gate, from 0."""
        suites = sorted({suite for _, suite in lacking})
        what = f"suite {suites[0]}" if len(suites) == 1 else f"{len(suites)} suites"
        return cls(
            f"the policy names {what} that this project does not have; push it first with "
            "`sluicegate suite push FILE`, which prints the digest that the policy must name",
            suites=suites,
            errors=[
                {"pointer": f"/gates/{place}/suite", "detail": f"there is no suite {suite}"} for place, suite in lacking
            ],
        )


class PolicyTooWeak(Problem):
    """The policy asks for fewer samples than its own rules can decide with. `errors` lists each rule."""

    kind, title, status = "policy-too-weak", "Policy too weak", 422
    advice = "Raise the samples that `errors` asks for, or loosen the limit that needs them."


class TooLarge(Problem):
    """The request is larger than the service accepts."""

    kind, title, status = "too-large", "Too large", 413
    advice = "Send less: files go to `PUT /v1/blobs/{digest}` in parts, and `detail` says the limit that was met."


class TooSlow(Problem):
    """The request was silent, or came too slowly. An upload goes on where it stopped: ask for its offset."""

    kind, title, status, retryable = "too-slow", "Too slow", 408, True
    advice = "Send it again; an upload goes on from the offset that the service tells."


class UnsupportedMediaType(Problem):
    """The request's content type is not the one the endpoint reads."""

    kind, title, status = "unsupported-media-type", "Unsupported media type", 415
    advice = "Send the content type that `detail` names."


class MalformedRequest(Problem):
    """The bytes received are no HTTP/1.1 request, or its first line and headers are too long. The connection ends."""

    kind, title, status = "malformed-request", "Malformed request", 400
    advice = "Look at what is between you and the service, a proxy or a client of your own: no library sends this."


class Unauthenticated(Problem):
    """No token, an unknown one, or an expired one. Log in with `sluicegate login`."""

    kind, title, status = "unauthenticated", "Unauthenticated", 401
    advice = (
        "Log in with `sluicegate login URL --token T`; an administrator makes a token with `sluicegate token create`."
    )


class NotPermitted(Problem):
    """The token's role does not allow this."""

    kind, title, status = "not-permitted", "Not permitted", 403
    advice = "Ask somebody whose role allows it; `sluicegate login` without arguments says who you are."


class NotFound(Problem):
    """There is no such thing in this project; of a deleted bundle `deleted_by` and `deleted_at` say who and when."""

    kind, title, status = "not-found", "Not found", 404
    advice = (
        "Look at what there is: the `list` of the command, or a page's list; another project has things of its own."
    )


class MethodNotAllowed(Problem):
    """The address exists, but not with this method."""

    kind, title, status = "method-not-allowed", "Method not allowed", 405
    advice = "Use a method that `detail` names; `GET /v1/openapi.json` describes every address."


class TransitionRefused(Problem):
    """A release in this phase does not take that act. `detail` says what the release is, and what to do instead."""

    kind, title, status = "transition-refused", "Transition refused", 409
    advice = (
        "Look at it with `sluicegate release show RELEASE`: it says what the release waits for, and what may be done."
    )


class Conflict(Problem):
    """Something else holds the name or the place."""

    kind, title, status = "conflict", "Conflict", 409
    advice = "Look at what `detail` names, and choose another name or end what holds this one."


class NoRunnerFits(Problem):
    """No runner of the class could run the bundle. It takes `needs`; `runners` says who lacks what, `fits` who can."""

    kind, title, status = "no-runner-fits", "No runner fits", 409
    advice = "Start a runner that has what `needs` says, choose another runner class, or make the bundle smaller."


class OffsetMismatch(Problem):
    """The upload goes on at another offset than the request names, or another request writes to it just now."""

    kind, title, status = "offset-mismatch", "Upload offset mismatch", 409
    advice = "Ask for the upload's offset, and go on from there; `sluicegate bundle create` does so by itself."


class QuotaExceeded(Problem):
    """The project would hold more than it may; nothing was stored. `resource`, `used` and `limit` say what."""

    kind, title, status = "quota-exceeded", "Quota exceeded", 409
    advice = "Delete what is not needed any more, or have an administrator raise it with `sluicegate project limit`."


class KeyReused(Problem):
    """The Idempotency-Key was used before for another request. `errors` lists each difference."""

    kind, title, status = "key-reused", "Idempotency key reused", 409
    advice = "Take a new key for a new request; for the same request send the same bytes."


class StaleEdit(Problem):
    """`If-Match` names what has changed since. `changed_by`, `changed_at` and `change` say what happened."""

    kind, title, status = "stale-edit", "Stale edit", 412
    advice = "Look at it again, and if the act is still meant, do it with the version that is shown now."


class TooManyRequests(Problem):
    """The token asks for more than the service does for one at a time. Wait for the seconds of `Retry-After`."""

    kind, title, status, retryable = "too-many-requests", "Too many requests", 429, True
    advice = "Wait for the seconds of `Retry-After`; follow the log with `watch` in place of asking again and again."


class LeaseLost(Problem):
    """The job's lease has passed to another holder. Stop what you are doing; do not report again."""

    kind, title, status = "lease-lost", "Lease lost", 409
    advice = "Nothing is to be done by a person: the job is another runner's, and that one reports."


class NotEligible(Problem):
    """The release may not move to traffic: evidence is missing, expired, or not passed."""

    kind, title, status = "not-eligible", "Not eligible", 409
    advice = (
        "Look at `sluicegate release show RELEASE`: run the gate that is missing or has expired again by a new release."
    )


class BundleQuarantined(NotEligible):
    """Nothing goes on with a bundle that is quarantined. `grounds` says why; a manager may lift it, with a reason."""

    kind, title, status = "bundle-quarantined", "Bundle quarantined", 409
    advice = (
        "Find out whether the bytes are right; then `sluicegate bundle lift BUNDLE --reason …`, or "
        "release another bundle."
    )


class ReferenceMissing(Problem):
    """A golden gate has no reference on this target. Record one with `sluicegate suite record`."""

    kind, title, status = "reference-missing", "Reference missing", 409
    advice = "Record one: `sluicegate suite record SUITE --bundle BUNDLE --target TARGET --reason … --wait`."


class Unavailable(Problem):
    """A part that the service needs does not answer. Try again."""

    kind, title, status, retryable = "unavailable", "Unavailable", 503, True
    advice = "Try again after a pause; `detail` names the part, and `/readyz` says which ones answer."


class GatewayUnconfirmed(Problem):
    """The gateway did not acknowledge a change in time. The change may or may not be in force."""

    kind, title, status, retryable = "gateway-unconfirmed", "Gateway unconfirmed", 503, True
    advice = "Look at what is in force with `sluicegate target show TARGET` before you do it again."


class EngineFailed(Problem):
    """The engine did not boot or died. `cause` classifies it; `log_tail` has its last lines."""

    kind, title, status = "engine-failed", "Engine failed", 502
    advice = "Read `log_tail`: `cause` says what kind of failure it is, and the README has a table of them."


class InternalError(Problem):
    """The service failed. The incident is in its log under the request id."""

    kind, title, status = "internal-error", "Internal error", 500
    advice = "Try again once; if it fails again, give `request_id` to whoever runs the service."


class Usage(Problem):
    """The command line does not say what to do, or names something that is not there: see the command's `--help`."""

    kind, title, status = "usage", "Usage", 400
    advice = "Read `detail`, and `--help` of the command, which has examples."


class NotPossibleHere(Problem):
    """This machine or directory does not allow it: something is taken, of another person, or not installed."""

    kind, title, status = "not-possible-here", "Not possible here", 409
    advice = (
        "Do what `detail` says: end what holds the port or the directory, name another one, or install what is missing."
    )


class Defect(Problem):
    """The command itself is wrong, and says nothing of what was asked. `SLUICEGATE_TRACEBACK=1` shows where."""

    kind, title, status = "defect", "Defect of the command", 500
    advice = "Report it with what `SLUICEGATE_TRACEBACK=1` shows; nothing was changed by what is not said to be done."


PROBLEMS: dict[str, type[Problem]] = {
    problem.kind: problem
    for problem in (
        InvalidDocument,
        DigestMismatch,
        BlobsMissing,
        SuiteMissing,
        PolicyTooWeak,
        TooLarge,
        TooSlow,
        UnsupportedMediaType,
        MalformedRequest,
        Unauthenticated,
        NotPermitted,
        NotFound,
        MethodNotAllowed,
        TransitionRefused,
        Conflict,
        NoRunnerFits,
        OffsetMismatch,
        QuotaExceeded,
        KeyReused,
        StaleEdit,
        TooManyRequests,
        LeaseLost,
        NotEligible,
        BundleQuarantined,
        ReferenceMissing,
        Unavailable,
        GatewayUnconfirmed,
        EngineFailed,
        InternalError,
        Usage,
        NotPossibleHere,
        Defect,
    )
}
"""Kind → class: the client raises the class that the service named."""


def problem_from(body: dict[str, Any], status: int) -> Problem:
    """Return the problem that an answer describes; InternalError keeps what is not understood."""
    kind = str(body.get("type", "")).rsplit("/", 1)[-1]
    members = {k: v for k, v in body.items() if k not in {"type", "title", "status", "detail"}}
    return PROBLEMS.get(kind, InternalError)(str(body.get("detail") or f"the service answered {status}"), **members)
