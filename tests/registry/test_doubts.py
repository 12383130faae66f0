"""A runner's copy has other bytes: the service reads its own blob, and what shares a damaged one is quarantined."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from gates.gate import MAX_FINDINGS
from registry import doubts, housekeeping, jobs, runners, runs
from registry.client import Client
from registry.tables import BlobDoubtRow, BlobRow
from schemas.api import RunCreate
from schemas.common import sha256_digest
from schemas.problems import NotFound, Unavailable
from schemas.result import GateResult
from schemas.runner import Report, RunnerRegistration
from tests.support.factories import registered_policy
from tests.support.holdings import SHARED, held, weights
from tests.support.world import FINGERPRINT

BLOB = sha256_digest(SHARED)


pytestmark = pytest.mark.usefixtures("sound")


@pytest.fixture
def author(api):
    return api.actor("engineer")


@pytest.fixture
def engineer(api):
    with Client(api.url, api.tokens["engineer"]) as client:
        yield client


def differs(*blobs, code="file-differs"):
    finding = {"code": code, "severity": "block", "message": "other bytes", "found": "sha256:" + "0" * 64}
    return [finding | {"expected": blob} for blob in blobs]


def fail(api, author, bundle, findings, verdict="failed"):
    """Let a runner report the integrity gate of a bundle."""
    service, policy = api.service, registered_policy(api.service, author)
    with service.database.transaction() as session:
        runs.create(session, service, author, RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class="cpu"))
        runner = runners.register(
            session,
            author.project_id,
            RunnerRegistration.model_validate(
                {"name": "r1", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"]}
                | {"boot_id": "b"}
            ),
        )
    with service.database.transaction() as session:
        claim = jobs.claim(session, service, runner)
    body = {"gate": "integrity", "definition": "sha256:" + "d" * 64, "verdict": verdict, "summary": "other bytes"}
    body |= {"measurements": [], "findings": findings, "duration_ms": 5, "source": "run"}
    said = Report(
        fencing_token=claim.fencing_token,
        act="gate:integrity",
        kind="gate_recorded",
        body=GateResult.model_validate(body).model_dump(mode="json", exclude_none=True),
    )
    with service.database.transaction() as session:
        jobs.report(session, service, author.project_id, claim.job, said)


def doubted(api):
    with api.service.database.transaction() as session:
        return sorted(session.scalars(select(BlobDoubtRow.digest)))


def spoil(api, blob=BLOB):
    path = api.service.blobs.path(blob)
    path.chmod(0o644)
    path.write_bytes(b"other bytes")


def causes(client, bundle):
    found = client.bundles.get(bundle.digest).quarantine
    return [] if found is None else [one.cause for one in found.grounds]


def test_a_damaged_blob_quarantines_everything_that_shares_it_once_one_runner_met_it(api, engineer, author):
    met, shares = held(api.service, author, "a"), held(api.service, author, "b")
    spoil(api)
    fail(api, author, met, differs(BLOB))
    assert (causes(engineer, met), causes(engineer, shares)) == (["integrity_gate"], [])
    assert housekeeping.tidy(api.service)["doubts_settled"] == 1
    assert causes(engineer, met) == ["integrity_gate", "blob_damaged"]
    assert causes(engineer, shares) == ["blob_damaged"]
    assert "; runner/r1 met it" in engineer.bundles.get(shares.digest).quarantine.grounds[0].reason
    assert (doubted(api), housekeeping.tidy(api.service)["doubts_settled"]) == ([], 0)


def test_a_copy_that_only_the_runner_has_wrong_quarantines_nothing_else(api, engineer, author):
    met, shares = held(api.service, author, "a"), held(api.service, author, "b")
    fail(api, author, met, differs(BLOB))
    assert doubts.settle(api.service) == 1
    assert (causes(engineer, met), causes(engineer, shares), doubted(api)) == (["integrity_gate"], [], [])
    with api.service.database.transaction() as session:
        assert session.get_one(BlobRow, BLOB).damaged_at is None


@pytest.mark.parametrize(
    ("findings", "verdict", "expected"),
    [
        (differs(BLOB, "sha256:" + "9" * 64), "failed", {BLOB}),
        (differs(BLOB, code="file-missing"), "failed", set()),
        (differs(BLOB), "errored", set()),
        (differs(*["sha256:" + "9" * 64] * MAX_FINDINGS), "failed", {BLOB, sha256_digest(weights("a"))}),
    ],
    ids=["a stranger's blob is not read", "a file that is missing", "nothing was found out", "more than are listed"],
)
def test_what_is_read_again_are_the_bundle_s_blobs_that_differed(api, author, findings, verdict, expected):
    fail(api, author, held(api.service, author, "a"), findings, verdict)
    assert set(doubted(api)) == expected


def test_a_doubt_waits_for_a_store_that_is_away_and_ends_with_a_blob_that_is_lost(api, engineer, author):
    shares = held(api.service, author, "b")
    fail(api, author, held(api.service, author, "a"), differs(BLOB))

    class Away:
        def open(self, digest, *, is_verified=False):
            raise Unavailable("the bucket does not answer")

    assert doubts.settle(replace(api.service, blobs=Away())) == 0
    assert doubted(api) == [BLOB]
    # Whoever took it may have died: it is another's when its time is over, and not before.
    assert doubts.settle(api.service) == 0
    with api.service.database.transaction() as session:
        session.execute(update(BlobDoubtRow).values(due_at=BlobDoubtRow.due_at - timedelta(hours=1)))
    spoil(api)
    assert doubts.settle(api.service) == 1
    assert causes(engineer, shares) == ["blob_damaged"]


def test_a_doubt_that_comes_while_the_blob_is_read_is_settled_by_another_reading(api, engineer, author):
    first, second = held(api.service, author, "a"), held(api.service, author, "b")
    fail(api, author, first, differs(BLOB))
    store = api.service.blobs

    class Meanwhile:
        """The store, whose blob is damaged, and met by another runner, after it was read and found intact."""

        told = 0

        def open(self, digest, *, is_verified=False):
            if self.told:
                return store.open(digest, is_verified=is_verified)
            self.told = 1
            with store.open(digest, is_verified=is_verified) as file:
                assert file.read() == SHARED
            fail(api, author, second, differs(BLOB))
            return store.open(digest, is_verified=is_verified)

    class Lost:
        def open(self, digest, *, is_verified=False):
            raise NotFound("gone")

    assert doubts.settle(replace(api.service, blobs=Meanwhile())) == 2
    assert doubted(api) == []
    fail(api, author, held(api.service, author, "c"), differs(BLOB))
    assert doubts.settle(replace(api.service, blobs=Lost())) == 0
    assert doubted(api) == []
    assert "blob_damaged" not in causes(engineer, first) + causes(engineer, second)
