"""Housekeeping: what has ended without clearing up, and what is too old to be kept. Safe at any time, from anywhere."""

import structlog

from registry import collection, doubts, erasure, uploads
from registry.service import Service

BLOBS = 200
"""Blobs that one round clears up."""

log = structlog.get_logger(__name__)


def tidy(service: Service) -> dict[str, int]:
    """Take away what nobody will miss. Returns what was done, as counts by name."""
    done = {
        "uploads_expired": uploads.expire(service),
        "files_discarded": service.discard_abandoned(),
        "records_erased": erasure.expire(service),
        "blobs_collected": collection.collect_some(service, BLOBS),
        "doubts_settled": doubts.settle(service),  # last: it reads whole files
    }
    if any(done.values()):
        log.info("tidied", **done)
    return done
