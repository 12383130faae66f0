"""Problems: every way the service says no, as RFC 9457 problem types.

A class is a type: its docstring is the page behind the type URI. `detail` says what happened and what to do.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self


class Problem(Exception):
    """Something was refused or did not work."""

    kind: ClassVar[str] = "problem"
    title: ClassVar[str] = "Problem"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

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


class DigestMismatch(Problem):
    """The bytes received, or those in the store, do not have the digest that the request names. Nothing was stored."""

    kind, title, status = "digest-mismatch", "Digest mismatch", 422


class BlobsMissing(Problem):
    """The bundle names files that have not been uploaded to this project. `missing` lists them."""

    kind, title, status = "blobs-missing", "Blobs missing", 422


class SuiteMissing(Problem):
    """The policy names suites that are not registered in this project. `suites` lists them; push them first."""

    kind, title, status = "suite-missing", "Suite missing", 422

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


class TooLarge(Problem):
    """The request is larger than the service accepts."""

    kind, title, status = "too-large", "Too large", 413


class TooSlow(Problem):
    """The request was silent, or came too slowly. An upload goes on where it stopped: ask for its offset."""

    kind, title, status, retryable = "too-slow", "Too slow", 408, True


class UnsupportedMediaType(Problem):
    """The request's content type is not the one the endpoint reads."""

    kind, title, status = "unsupported-media-type", "Unsupported media type", 415


class MalformedRequest(Problem):
    """The bytes received are no HTTP/1.1 request, or its first line and headers are too long. The connection ends."""

    kind, title, status = "malformed-request", "Malformed request", 400


class Unauthenticated(Problem):
    """No token, an unknown one, or an expired one. Log in with `sluicegate login`."""

    kind, title, status = "unauthenticated", "Unauthenticated", 401


class NotPermitted(Problem):
    """The token's role does not allow this."""

    kind, title, status = "not-permitted", "Not permitted", 403


class NotFound(Problem):
    """There is no such thing in this project; of a deleted bundle `deleted_by` and `deleted_at` say who and when."""

    kind, title, status = "not-found", "Not found", 404


class MethodNotAllowed(Problem):
    """The address exists, but not with this method."""

    kind, title, status = "method-not-allowed", "Method not allowed", 405


class TransitionRefused(Problem):
    """A release in this phase does not take that act. `detail` says what the release is, and what to do instead."""

    kind, title, status = "transition-refused", "Transition refused", 409


class Conflict(Problem):
    """Something else holds the name or the place."""

    kind, title, status = "conflict", "Conflict", 409


class NoRunnerFits(Problem):
    """No runner of the class could run the bundle. It takes `needs`; `runners` says who lacks what, `fits` who can."""

    kind, title, status = "no-runner-fits", "No runner fits", 409


class OffsetMismatch(Problem):
    """The upload goes on at another offset than the request names, or another request writes to it just now."""

    kind, title, status = "offset-mismatch", "Upload offset mismatch", 409


class QuotaExceeded(Problem):
    """The project would hold more than it may; nothing was stored. `resource`, `used` and `limit` say what."""

    kind, title, status = "quota-exceeded", "Quota exceeded", 409


class KeyReused(Problem):
    """The Idempotency-Key was used before for another request. `errors` lists each difference."""

    kind, title, status = "key-reused", "Idempotency key reused", 409


class StaleEdit(Problem):
    """`If-Match` names what has changed since. `changed_by`, `changed_at` and `change` say what happened."""

    kind, title, status = "stale-edit", "Stale edit", 412


class TooManyRequests(Problem):
    """The token has sent more requests than the service takes from one. Wait for the seconds of `Retry-After`."""

    kind, title, status, retryable = "too-many-requests", "Too many requests", 429, True


class LeaseLost(Problem):
    """The job's lease has passed to another holder. Stop what you are doing; do not report again."""

    kind, title, status = "lease-lost", "Lease lost", 409


class NotEligible(Problem):
    """The release may not move to traffic: evidence is missing, expired, or not passed."""

    kind, title, status = "not-eligible", "Not eligible", 409


class BundleQuarantined(NotEligible):
    """Nothing goes on with a bundle that is quarantined. `grounds` says why; a manager may lift it, with a reason."""

    kind, title, status = "bundle-quarantined", "Bundle quarantined", 409


class ReferenceMissing(Problem):
    """A golden gate has no reference on this target. Record one with `sluicegate suite record`."""

    kind, title, status = "reference-missing", "Reference missing", 409


class Unavailable(Problem):
    """A part that the service needs does not answer. Try again."""

    kind, title, status, retryable = "unavailable", "Unavailable", 503, True


class GatewayUnconfirmed(Problem):
    """The gateway did not acknowledge a change in time. The change may or may not be in force."""

    kind, title, status, retryable = "gateway-unconfirmed", "Gateway unconfirmed", 503, True


class EngineFailed(Problem):
    """The engine did not boot or died. `cause` classifies it; `log_tail` has its last lines."""

    kind, title, status = "engine-failed", "Engine failed", 502


class InternalError(Problem):
    """The service failed. The incident is in its log under the request id."""

    kind, title, status = "internal-error", "Internal error", 500


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
    )
}
"""Kind → class: the client raises the class that the service named."""


def problem_from(body: dict[str, Any], status: int) -> Problem:
    """Return the problem that an answer describes; InternalError keeps what is not understood."""
    kind = str(body.get("type", "")).rsplit("/", 1)[-1]
    members = {k: v for k, v in body.items() if k not in {"type", "title", "status", "detail"}}
    return PROBLEMS.get(kind, InternalError)(str(body.get("detail") or f"the service answered {status}"), **members)
