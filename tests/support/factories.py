"""Documents that are valid and small, built through the public models and functions."""

import itertools
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry import blobs, documents, evidence, releases, targets
from registry.auth import Actor
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.api import ReleaseCreate, TargetCreate
from schemas.bundle import Bundle
from schemas.common import Closed, sha256_digest
from schemas.evidence import Kind, Traffic
from schemas.policy import Policy
from schemas.reference import Reference
from schemas.suite import GoldenSuite, LoadSuite

_PARALLEL = ("tensor", "pipeline", "expert", "data", "context")
WEIGHTS = b"weights of a model\n"


def file_entry(path: str, content: bytes, role: str) -> dict[str, Any]:
    """Return the entry of one file in a bundle."""
    return {"path": path, "size": len(content), "sha256": sha256_digest(content), "role": role}


def bundle_body(name: str = "chat", content: bytes = WEIGHTS, **changes: Any) -> dict[str, Any]:
    """Return the JSON of a bundle of one file; `changes` replace whole sections, and None leaves one out."""
    body: dict[str, Any] = {
        "schema": Bundle.SCHEMA_ID,
        "name": name,
        "sources": [{"kind": "directory", "revision": "test"}],
        "files": [file_entry("model.gguf", content, "weights")],
        "model": {"format": "gguf", "architecture": "llama"},
        "tokenizer": {"origin": "weights"},
        "template": {"origin": "weights"},
        "quantization": {"method": "none"},
        "engine": {
            "name": "llamacpp",
            "version": "test",
            "environment": sha256_digest(b"environment"),
            "arguments": [],
        },
        "topology": {**{f"{kind}_parallel": 1 for kind in _PARALLEL}, "nodes": 1},
        "hardware": {"accelerator": "cpu", "count": 0},
        "runtime": {"context_tokens": 512, "max_sequences": 4},
        "serving": {
            "served_name": "chat",
            "features": ["chat", "streaming"],
            "usage": "all_tokens",
            "cancellation": "on_disconnect",
        },
        "licence": {"identifier": "Apache-2.0"},
    }
    return {key: value for key, value in (body | changes).items() if value is not None}


def policy_body(name: str = "quick", **changes: Any) -> dict[str, Any]:
    """Return the JSON of a policy that needs no suite and can decide."""
    body: dict[str, Any] = {
        "schema": Policy.SCHEMA_ID,
        "name": name,
        "description": "For tests: loose limits, small samples.",
        "gates": [
            {"gate": "integrity"},
            {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"},
        ],
        "approval": {"required": 0},
        "canary": canary_body(),
        "evidence_seconds": "86400",
    }
    return {key: value for key, value in (body | changes).items() if value is not None}


def canary_body(weights: tuple[int, ...] = (1000, 10_000), **changes: Any) -> dict[str, Any]:
    """Return the JSON of a canary plan with these weights."""
    step = {"hold_seconds": "1", "min_requests": 59, "max_seconds": "120"}
    body: dict[str, Any] = {
        "steps": [{"weight_bp": weight, **step} for weight in weights],
        "stop_conditions": [{"metric": "error_ratio", "max_ratio": "0.05"}],
        "soak_seconds": "2",
        "dead_man_seconds": "60",
        "drain_seconds": "5",
    }
    return body | changes


def golden_body(name: str = "golden", prompts: tuple[str, ...] = ("ping", "pong")) -> dict[str, Any]:
    """Return the JSON of a golden suite with one prompt a text."""
    return {
        "schema": GoldenSuite.SCHEMA_ID,
        "name": name,
        "prompts": [_prompt(f"p{place}", text) for place, text in enumerate(prompts)],
        "top_k": 5,
        "repeats": 2,
    }


def load_body(name: str = "load", requests: int = 60, gap_us: int = 10_000) -> dict[str, Any]:
    """Return the JSON of a load suite that sends one prompt at a constant rate."""
    times = itertools.count(gap_us, gap_us)
    return {
        "schema": LoadSuite.SCHEMA_ID,
        "name": name,
        "prompts": [_prompt("p0", "ping")],
        "process": {"distribution": "constant", "rate_per_second": str(1_000_000 // gap_us)},
        "warmup": [{"at_us": 0, "prompt": "p0"}],
        "plan": [{"at_us": next(times), "prompt": "p0"} for _ in range(requests)],
        "request_seconds": "10",
    }


def load_spec_body(**changes: Any) -> dict[str, Any]:
    """Return the JSON of a load spec, from which a plan of 60 arrivals is drawn."""
    body: dict[str, Any] = {
        "name": "spec",
        "prompts": golden_body()["prompts"],
        "rate_per_second": "50",
        "requests": 60,
        "warmup_requests": 5,
        "distribution": "gamma",
        "shape": "1",
        "seed": 7,
        "request_seconds": "10",
    }
    return body | changes


def reference_body(suite: GoldenSuite, bundle: str) -> dict[str, Any]:
    """Return the JSON of a reference in which every prompt is answered with one token."""
    token = {"id": 7, "text": "x", "logprob": "-0.1"}
    return {
        "schema": Reference.SCHEMA_ID,
        "suite": suite.digest,
        "bundle": bundle,
        "engine": "llamacpp test",
        "hardware": "cpu",
        "recordings": [
            {
                "prompt": prompt.id,
                "prompt_ids": [1, 2, 3],
                "output": [{**token, "top": [token]}],
                "finish_reason": "stop",
            }
            for prompt in suite.prompts
        ],
        "noise": {"repeats": 2, "diverging_prompts": 0, "max_margin_nat": "0"},
    }


def _prompt(identity: str, text: str) -> dict[str, Any]:
    return {"id": identity, "messages": [{"role": "user", "content": text}], "max_tokens": 8}


def upload(service: Service, actor: Actor, *contents: bytes) -> None:
    """Store blobs in the actor's project."""
    for content in contents:
        blobs.store(service, actor.project_id, sha256_digest(content), [content], limit=2**30)


def registered_bundle(
    service: Service, actor: Actor, name: str = "chat", content: bytes = WEIGHTS, **changes: Any
) -> Bundle:
    """Register a bundle of one file, with its bytes."""
    upload(service, actor, content)
    bundle = Bundle.model_validate(bundle_body(name, content, **changes))
    return _registered(service, actor, "bundle", bundle)


def registered_policy(service: Service, actor: Actor, name: str = "quick", **changes: Any) -> Policy:
    """Register a policy."""
    return _registered(service, actor, "policy", Policy.model_validate(policy_body(name, **changes)))


def registered_golden(service: Service, actor: Actor, name: str = "golden") -> GoldenSuite:
    """Register a golden suite."""
    return _registered(service, actor, "suite", GoldenSuite.model_validate(golden_body(name)))


def registered_load(
    service: Service, actor: Actor, name: str = "load", requests: int = 60, gap_us: int = 10_000
) -> LoadSuite:
    """Register a load suite."""
    return _registered(service, actor, "suite", LoadSuite.model_validate(load_body(name, requests, gap_us)))


def created_target(service: Service, actor: Actor, name: str = "chat@prod") -> UUID:
    """Make a target."""
    with service.database.transaction() as session:
        body = TargetCreate(name=name, runner_class="cpu", gateway="local")
        return targets.create(session, service, actor, body).id


def started_release(service: Service, actor: Actor, target: str = "chat@prod", **policy: Any) -> UUID:
    """Start a release of a new bundle under a new policy on a new target; `policy` changes the policy."""
    created_target(service, actor, target)
    bundle = registered_bundle(service, actor)
    rules = registered_policy(service, actor, **policy)
    body = ReleaseCreate(target=target, bundle=bundle.digest, policy=rules.digest, reason="a test")
    with service.database.transaction() as session:
        return releases.create(session, service, actor, body).id


def state_act(service: Service, release: UUID, kind: Kind, body: Closed, act: str = "") -> evidence.Signed:
    """Sign an act on a release."""
    return evidence.state(
        service.signer,
        evidence.release_stream(release),
        act or str(kind),
        "test",
        kind,
        body,
        subjects={"bundle": sha256_digest(b"bundle")},
        now=datetime.now(UTC),
    )


def record_act(service: Service, release: UUID, kind: Kind, body: Closed, act: str = "") -> str:
    """Record an act on a release and return its phase after it."""
    signed = state_act(service, release, kind, body, act)
    with service.database.transaction() as session:
        row, _ = evidence.record(session, signed)
        if isinstance(body, Traffic):
            remember(session, row, body)
        return row.phase


def remember(session: Session, release: ReleaseRow, body: Traffic) -> None:
    """Keep beside the log what it says of a target's traffic, as the controller does."""
    target = targets.lock(session, release.target_id)
    target.applied = [arm.model_dump(mode="json") for arm in body.desired]
    target.generation += 1
    session.flush()


def _registered(service: Service, actor: Actor, kind: str, document: documents.DocumentT) -> documents.DocumentT:
    with service.database.transaction() as session:
        documents.register(session, service, actor, kind, document.canonical())
    return document
