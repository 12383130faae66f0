"""A row by which a project may read a blob of somebody else's: found and named, also where the counts were adjusted."""

from sqlalchemy import text

from registry import adoption, blobs, projects, verification
from schemas.common import sha256_digest

SECRET = b"weights of another project"
DIGEST = sha256_digest(SECRET)
PLANT = (
    "INSERT INTO project_blobs (project_id, digest, created_at, used_at{}) SELECT :mine, digest, now(), now(){} FROM"
)
COUNT = "INSERT INTO project_usage (project_id, part, bytes, documents) VALUES (:mine, 99, :size, 0)"


def told(service, project):
    with service.database.transaction() as session:
        found = verification.verify(session, project, signer=service.signer.key_id)
    return [(fault.stream, fault.problem) for fault in found.faults]


def test_a_blob_that_nobody_sent_is_named(service, actor):
    with service.database.transaction() as session:
        other = projects.create(session, service, "other", by="root").id
    blobs.store(service, other, DIGEST, [SECRET], limit=100)
    blobs.store(service, actor.project_id, sha256_digest(b"mine"), [b"mine"], limit=100)
    mine = {"mine": actor.project_id}
    with service.database.transaction() as session:
        session.execute(text(COUNT), mine | {"size": len(SECRET)})
        session.execute(text(PLANT.format("", "") + " blobs WHERE digest = :digest"), mine | {"digest": DIGEST})
    problem = f"it holds the blob {DIGEST}, and nobody has sent that"
    named = [(f"project/{actor.project_id}", problem)]
    assert told(service, actor.project_id) == named
    assert told(service, other) == []
    # Nor is it taken over, or made good by the proof of another project.
    adoption.adopt(service)
    assert told(service, actor.project_id) == named
    with service.database.transaction() as session:
        copied = "UPDATE project_blobs AS one SET proof = other.proof FROM project_blobs AS other"
        copied += " WHERE one.digest = other.digest AND other.project_id <> one.project_id AND one.proof IS NULL"
        assert session.execute(text(copied)).rowcount == 1
    assert told(service, actor.project_id) == named


def test_a_blob_that_an_older_version_took_meanwhile_is_signed_when_it_is_sent_again(service, actor):
    blobs.store(service, actor.project_id, DIGEST, [SECRET], limit=100)
    with service.database.transaction() as session:
        session.execute(text("UPDATE project_blobs SET proof = NULL"))
    assert len(told(service, actor.project_id)) == 1
    blobs.store(service, actor.project_id, DIGEST, [SECRET], limit=100)
    assert told(service, actor.project_id) == []
