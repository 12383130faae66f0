"""Bundles that share files, live and superseded releases of them, and blobs whose time of grace is over."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import update

from registry import blobs, documents, releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import ProjectBlobRow
from schemas.api import ReleaseCreate
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from schemas.evidence import Approved, Decision, EngineBooted, Kind, Note, Replaced, Staged
from tests.support.factories import bundle_body, file_entry, record_act, registered_policy, upload
from tests.support.phases import first_traffic
from tests.support.world import FINGERPRINT

SHARED = b"the licence that all of them have\n"
ENGINE = {"name": "llamacpp", "version": "t", "arguments": [], "model_ids": ["chat"], "context_tokens": 512}


def body(name: str, *, adapter_base: str | None = None) -> dict[str, Any]:
    """Return the JSON of a bundle with weights of its own and one file that all have; with an adapter when asked."""
    files = [file_entry("README.md", SHARED, "documentation"), file_entry("model.gguf", weights(name), "weights")]
    if adapter_base is None:
        return bundle_body(name, files=files)
    files.insert(1, file_entry("adapter.gguf", weights(f"{name} adapter"), "adapter"))
    adapter = {"name": "a", "files": ["adapter.gguf"], "base": adapter_base, "rank": 8, "target_modules": ["q"]}
    return bundle_body(name, files=files, adapters=[adapter])


def weights(name: str) -> bytes:
    """Return the bytes that only one bundle has."""
    return f"weights of {name}\n".encode()


def sent(service: Service, actor: Actor, name: str, *, adapter_base: str | None = None) -> Bundle:
    """Upload what a bundle is made of, and do not register it."""
    upload(service, actor, SHARED, weights(name), *([weights(f"{name} adapter")] if adapter_base else []))
    return Bundle.model_validate(body(name, adapter_base=adapter_base))


def held(service: Service, actor: Actor, name: str, *, adapter_base: str | None = None) -> Bundle:
    """Upload and register a bundle."""
    bundle = sent(service, actor, name, adapter_base=adapter_base)
    register(service, actor, bundle)
    return bundle


def register(service: Service, actor: Actor, bundle: Bundle) -> bool:
    """Register a bundle; returns whether it is new."""
    with service.database.transaction() as session:
        return documents.register(session, service, actor, "bundle", bundle.canonical())[1]


def live(
    service: Service, actor: Actor, bundle: Bundle, target: str = "chat@prod", *, over: UUID | None = None
) -> UUID:
    """Take a bundle live on a target that is there, over the release that is live."""
    release = started(service, actor, bundle, target)
    record_act(service, release, Kind.STAGED, Staged(files=1, size=1, duration_ms=1))
    booted = {"engine": ENGINE, "fingerprint": FINGERPRINT, "runner": "r1", "ready_ms": 10}
    record_act(service, release, Kind.ENGINE_BOOTED, EngineBooted.model_validate(booted))
    record_act(service, release, Kind.GATES_PASSED, Decision(gates={}))
    record_act(service, release, Kind.APPROVED, Approved(approvals=[], required=0))
    first_traffic(service, release)
    if over is not None:
        record_act(service, over, Kind.REPLACED, Replaced(release=release))
    record_act(service, release, Kind.PROMOTED, Note(reason="every step passed"))
    return release


def started(service: Service, actor: Actor, bundle: Bundle, target: str = "chat@prod") -> UUID:
    """Begin a release on a target that is there."""
    policy = registered_policy(service, actor)
    wanted = ReleaseCreate(target=target, bundle=bundle.digest, policy=policy.digest)
    with service.database.transaction() as session:
        return releases.create(session, service, actor, wanted).id


def age(service: Service, **by: float) -> None:
    """Let every blob have been used so much longer ago: `days=2`."""
    with service.database.transaction() as session:
        session.execute(update(ProjectBlobRow).values(used_at=ProjectBlobRow.used_at - timedelta(**by)))


def there(service: Service, *contents: bytes) -> list[bool]:
    """Tell of each content whether the store has it."""
    return [service.blobs.exists(sha256_digest(content)) for content in contents]


@contextmanager
def settings(service: Service, **changes: Any) -> Iterator[None]:
    """Let a service have other settings for a while."""
    before = service.settings
    object.__setattr__(service, "settings", before.model_copy(update=changes))
    try:
        yield
    finally:
        object.__setattr__(service, "settings", before)


def project_holds(service: Service, actor: Actor, *contents: bytes) -> list[bool]:
    """Tell of each content whether the project has it."""
    digests = [sha256_digest(content) for content in contents]
    with service.database.transaction() as session:
        mine = blobs.sizes(session, actor.project_id, digests)
    return [digest in mine for digest in digests]
