"""Housekeeping: what has ended without clearing up, and what is too old to be kept. Safe at any time, from anywhere."""

import structlog

from registry import uploads
from registry.service import Service

log = structlog.get_logger(__name__)


def tidy(service: Service) -> dict[str, int]:
    """Take away what nobody will miss. Returns what was done, as counts by name."""
    done = {"uploads_expired": uploads.expire(service), "files_discarded": service.discard_abandoned()}
    if any(done.values()):
        log.info("tidied", **done)
    return done
