"""The record job: have an accepted bundle answer a golden suite, and hand in its answers as a reference."""

from gates import golden
from gates.dialects.table import dialect_of
from gates.errors import InstrumentError
from schemas.evidence import Kind
from schemas.problems import InvalidDocument, Problem
from schemas.suite import GoldenSuite
from workers.attending import Attendant
from workers.boot import (
    booted,
    endpoint_of,
    gate_replica,
    require_engine,
    require_integrity,
    require_untouched,
    start_and_wait,
)
from workers.lease import Lease
from workers.site import Site

BOOT_SECONDS = 600.0


class NotRecorded(Problem):
    """The engine's answers cannot serve as a reference. `detail` says what to change."""

    kind, title, status = "not-recorded", "Not recorded", 409


def record(site: Site, lease: Lease) -> None:
    """Boot the job's bundle, record its answers to the job's suite, and hand the reference in.

    Raises:
        JobEnded: the lease was lost, the job is no longer wanted, or this runner stops.
        Problem, OSError: nothing was recorded; to be tried again.
    """
    suites = [site.suite(lease, digest) for digest in lease.claim.suites]
    if len(suites) != 1 or not isinstance(suites[0], GoldenSuite):
        raise InvalidDocument(f"job {lease.job} must name one golden suite", errors=[])
    bundle = site.bundle(lease)
    require_engine(bundle, site.launcher)
    try:
        golden.require_told(dialect_of(bundle.engine))
    except InstrumentError as error:
        raise NotRecorded(str(error)) from error
    place = site.stage(lease, bundle)
    lease.report(Kind.STAGED, lease.act("staged", 1), place.facts)
    seen = require_integrity(site, lease, bundle, place)
    with gate_replica(site, lease, bundle, place) as replica:
        ready = start_and_wait(lease, replica, BOOT_SECONDS)
        require_untouched(site, bundle, place, seen)
        booted(site, lease, ready, place)
        attendant = Attendant(replica)
        try:
            with attendant:
                reference = golden.record(
                    endpoint_of(replica),
                    suites[0],
                    bundle,
                    engine=ready.identity,
                    hardware=site.hardware,
                    progress=lease.progress,
                )
        except InstrumentError as error:
            lease.check()
            raise attendant.failure or NotRecorded(str(error)) from error
        lease.check()
        if attendant.failure is not None:
            raise attendant.failure
        raw = reference.canonical()
        lease.patiently(lambda token: site.client.jobs.post_reference(lease.job, raw, fencing_token=token))
