"""What the jobs of one runner share: where they are, what they work with, and the documents they are given."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from gates.fitting import Needs
from registry.client import Client
from schemas.api import Registered
from schemas.bundle import Bundle
from schemas.common import Document
from schemas.policy import Policy
from schemas.problems import DigestMismatch, InvalidDocument, Problem
from schemas.reference import Reference
from schemas.runner import Fingerprint
from schemas.suite import SUITE, AnySuite
from workers.launchers.base import Launcher, Order
from workers.lease import Lease
from workers.staging import Place, Staging

log = structlog.get_logger("workers.site")

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True, slots=True)
class Site:
    """One runner, as its jobs see it."""

    name: str
    data_dir: Path
    fingerprint: Fingerprint
    hardware: str
    """Class of like hardware: the runner's class."""
    staging: Staging
    launcher: Launcher
    client: Client
    others: tuple[Launcher, ...] = ()
    """Launchers under which something of this runner may still run, that it starts nothing with."""
    identifiers: tuple[str, ...] = ()
    """What the driver calls the accelerators of the fingerprint, in the same order."""

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """The launchers that know what this runner has, its own first."""
        return (self.launcher, *self.others)

    def devices(self, lease: Lease, bundle: Bundle, beside: Bundle | None = None) -> tuple[str, ...]:
        """Return the accelerators that are reserved for a replica of a job, as the driver names them.

        Those of a replica that runs `beside` the job's own follow on its own. A cluster chooses by itself: none are
        named there.

        Raises:
            IndexError: the service knows of more than there are here now, and this runner has to register again; or too
                few are reserved.
        """
        if self.launcher.name == "kubernetes":
            return ()
        reserved, count = lease.claim.devices, Needs.of(bundle).count
        if beside is None:
            if len(reserved) < count:
                # With none named, an engine would see all of them, and those of others.
                detail = f"{len(reserved)} accelerators are reserved for job {lease.job}, whose replica takes {count}"
                raise IndexError(detail)
            return tuple(self.identifiers[place] for place in reserved[:count])
        own = Needs.of(beside).count
        if len(reserved) < own + count:
            detail = (
                f"{len(reserved)} accelerators are reserved for job {lease.job}, whose two replicas take {own + count}"
            )
            raise IndexError(detail)
        return tuple(self.identifiers[place] for place in reserved[own : own + count])

    def order(self, lease: Lease, bundle: Bundle, files: Path, beside: Bundle | None = None) -> Order:
        """Return a replica of a job as its launcher takes it. Raises IndexError as `devices` does."""
        devices = self.devices(lease, bundle, beside)
        # The plan is that of the job's own bundle.
        planned = lease.claim.planned_bytes if beside is None else None
        return Order(bundle, files, str(lease.job), lease.token, devices, planned or 0)

    # ------------------------------------------------------------------------------------------ documents

    def bundle(self, lease: Lease, digest: str | None = None) -> Bundle:
        """Return the job's bundle, or another one. Raises DigestMismatch when the service answers with another one."""
        digest = digest or lease.claim.bundle
        stored = lease.patiently(lambda _: self.client.bundles.get(digest))
        return _checked(Bundle.model_validate(_body(stored)), digest)

    def policy(self, lease: Lease) -> Policy | None:
        """Return the job's policy, if it has one."""
        digest = lease.claim.policy
        if digest is None:
            return None
        stored = lease.patiently(lambda _: self.client.policies.get(digest))
        return _checked(Policy.model_validate(_body(stored)), digest)

    def suite(self, lease: Lease, digest: str) -> AnySuite:
        """Return a suite."""
        stored = lease.patiently(lambda _: self.client.suites.get(digest))
        return _checked(SUITE.validate_python(_body(stored)), digest)

    def reference(self, lease: Lease, digest: str) -> Reference:
        """Return a golden reference."""
        stored = lease.patiently(lambda _: self.client.references.get(digest))
        return _checked(Reference.model_validate(_body(stored)), digest)

    # ---------------------------------------------------------------------------------------------- bytes

    def stage(self, lease: Lease, bundle: Bundle) -> Place:
        """Put the bundle's files where an engine reads them; what breaks off for lack of an answer goes on.

        Where bytes are not those asked for, the service reads its own again: only what it finds is about the bundle.
        """
        # A drill stages what is accepted too, and boots from it more than once.
        self.staging.hold(bundle.digest, str(lease.job))
        try:
            return lease.patiently(lambda _: self.staging.stage(bundle, self._fetch, lease.step))
        except DigestMismatch as problem:
            digest = problem.members.get("expected")
            if isinstance(digest, str) and "received" in problem.members:
                self.doubt(digest)
            raise

    def doubt(self, digest: str) -> None:
        """Let the service read its own blob again, where that can be asked now."""
        try:
            self.client.blobs.check(digest)
        except Problem as refused:
            log.warning("blob_not_checked", digest=digest, detail=refused.detail)

    def _fetch(self, digest: str) -> Iterator[bytes]:
        with self.client.blobs.stream(digest) as chunks:
            yield from chunks


def _body(stored: Registered) -> dict[str, object]:
    if stored.document is None:
        raise InvalidDocument(f"the service gave no document for {stored.digest}", errors=[])
    return stored.document


def _checked(document: DocumentT, digest: str) -> DocumentT:
    if document.digest != digest:
        raise DigestMismatch(f"asked for {digest}, the service answered with {document.digest}")
    return document
