"""A project's evidence, taken away and verified where there is no service."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from gates import archive
from registry import db, keys, verification
from registry.client import Client
from registry.keys import Signer
from schemas.evidence import Kind
from tests.support.api import Api
from tests.support.factories import registered_policy
from tests.support.life import live_through

ROOT = Path(__file__).parents[2]
ALONE = """
import sys
from gates import archive
with open(sys.argv[1], "rb") as file:
    found = archive.verify(file, pinned=archive.public_keys(open(sys.argv[2]).read()).keys())
print(found.model_dump_json())
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"sqlalchemy", "registry", "workers", "httpx", "fastapi", "psycopg"}, loaded
"""


def alone(path: Path, key: Path) -> dict:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", ALONE, str(path), str(key)],
        cwd=path.parent, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_project_s_whole_life_is_exported_and_verified_elsewhere(service, actor, tmp_path):
    with service.database.transaction() as session:
        first = keys.history(session)[0].public_key_pem
    live_through(service, actor, tmp_path)
    path, trusted = tmp_path / "evidence.jsonl", tmp_path / "trusted.pem"
    trusted.write_text(first)
    with Api(service) as api, Client(api.url, api.tokens["engineer"]) as client, path.open("wb") as file:
        made = client.evidence.export(file)
        assert client.evidence.verify(checkpoint=made.checkpoint).verified
    found = alone(path, trusted)
    assert found["faults"] == []
    assert (found["entries"], found["checkpoints"], found["sealed"]) == (made.entries, made.checkpoints, made.entries)
    assert (made.keys, made.documents, made.size) == (2, 7, path.stat().st_size)
    kinds = Counter(
        json.loads(line)["entry"]["kind"] for line in path.read_text().splitlines() if line.startswith('{"entry"')
    )
    assert {Kind.KEY_ROTATED, Kind.EVIDENCE_REVOKED, Kind.REFERENCE_SET, Kind.ROLLBACK_REQUESTED} <= set(kinds)
    with service.database.transaction() as session:
        db.freeze(session)
        assert verification.verify(session, actor.project_id).faults == []
    # The key of the end vouches for the one that it took the place of; a stranger for none.
    with path.open("rb") as file:
        assert archive.verify(file, pinned=[service.signer.key_id]).verified
    with path.open("rb") as file:
        assert not archive.verify(file, pinned=[Signer.load(tmp_path / "stranger.pem").key_id]).verified


@pytest.fixture
def here(own_api, command):
    command.be("engineer", own_api)
    return command


def test_export_and_verification_from_the_command_line(here, own_api, tmp_path):
    path, key = tmp_path / "evidence.jsonl", tmp_path / "trusted.pem"
    told = here.ok("evidence", "keys", "--pem", key)
    assert key.read_text() == own_api.service.signer.public_key_pem
    assert f"{own_api.service.signer.key_id[:16]}  ECDSA" in told.out.replace("ecdsa", "ECDSA")
    assert "signs now" in told.out
    assert here("evidence", "keys", "--pem", key).status == 2
    (listed,) = here.ok("evidence", "keys", "--json").json["items"]
    assert (listed["key_id"], listed["valid_until"]) == (own_api.service.signer.key_id, None)
    made = here.ok("evidence", "export", path, "--json").json
    count = made["entries"]
    here.use("http://127.0.0.1:1", None)  # nothing answers there
    ran = here.ok("evidence", "verify", "--archive", path)
    assert ran.out == f"verified: {count} entries in 1 stream, {count} of them under 1 checkpoint\n"
    assert "trust yours with --key" in ran.err
    ran = here.ok("evidence", "verify", "--archive", path, "--key", key, "--checkpoint", made["checkpoint"])
    assert "--key" not in ran.err
    assert here("evidence", "verify", "--archive", path, "--checkpoint", "0" * 64).status == 1
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    ran = here("evidence", "verify", "--archive", path, "--key", key)
    assert ran.status == 1
    assert ran.out.startswith("not verified: ")


def test_an_archive_signed_with_another_key_fails_under_the_one_that_is_trusted(here, tmp_path):
    path, key = tmp_path / "evidence.jsonl", tmp_path / "other.pem"
    key.write_text(keys.Signer.load(tmp_path / "other-private.pem").public_key_pem)
    here.ok("evidence", "export", path)
    ran = here("evidence", "verify", "--archive", path, "--key", key)
    assert ran.status == 1
    assert "neither is it trusted nor did a trusted key introduce it" in ran.out


def test_who_pins_the_lost_key_too_verifies_what_was_signed_before_and_after_it_was_lost(
    here, own_api, actor, tmp_path
):
    service, path = own_api.service, tmp_path / "evidence.jsonl"
    first, second, both = (tmp_path / f"{name}.pem" for name in ("first", "second", "both"))
    registered_policy(service, actor, name="before")
    first.write_text(service.signer.public_key_pem)
    service.settings.signing_key.unlink()
    keys.create(service.settings.signing_key)
    with service.database.transaction() as session:
        keys.enroll(session, service.signer, at=db.now(session))
    registered_policy(service, actor, name="after")
    second.write_text(service.signer.public_key_pem)
    both.write_text(first.read_text() + second.read_text())
    here.ok("evidence", "export", path)
    told = {key: here("evidence", "verify", "--archive", path, "--key", key) for key in (first, second, both)}
    assert {key: ran.status for key, ran in told.items()} == {first: 1, second: 1, both: 0}
    for key in (first, second):
        assert "neither is it trusted nor did a trusted key introduce it" in told[key].out
    assert here("evidence", "verify").status == 1


def test_what_was_cut_is_said_first_and_what_follows_from_it_is_not_said_without_end(here, own_api, actor, tmp_path):
    for number in range(30):
        registered_policy(own_api.service, actor, name=f"policy-{number}")
    path = tmp_path / "evidence.jsonl"
    here.ok("evidence", "export", path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    ran = here("evidence", "verify", "--archive", path)
    assert ran.status == 1
    rows = ran.out.splitlines()
    assert "the archive was cut" in rows[2]
    assert rows[-1].startswith("and ")
    assert len(rows) == 23
    assert max(map(len, rows)) < 140
    assert len(here("evidence", "verify", "--archive", path, "--json").json["faults"]) > 20


def test_what_makes_no_sense_is_usage(here, tmp_path):
    path = tmp_path / "evidence.jsonl"
    path.write_text('{"model": "none"}')
    ran = here("evidence", "verify", "--archive", path)
    assert (ran.status, "no archive of evidence" in ran.err) == (2, True)
    path.unlink()
    here.ok("evidence", "export", path)
    refused = here("evidence", "export", path)
    assert (refused.status, "name another file" in refused.err) == (2, True)
    assert here("evidence", "export", tmp_path / "none" / "evidence.jsonl").status == 2
    assert here("evidence", "verify", "--archive", tmp_path / "none").status == 2
    assert here("evidence", "verify", "--archive", path, "--key", tmp_path / "none").status == 2
    assert here("evidence", "verify", "--archive", path, "--key", path).status == 2
    assert here("evidence", "verify", "--archive", path, "--stream", "release/x").status == 2
    assert here("evidence", "verify", "--key", path).status == 2
    assert here("evidence", "verify", "--checkpoint", "41d0").status == 2
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".part")] == []


def test_a_checkpoint_from_the_command_line(here):
    made = here.ok("evidence", "checkpoint", "--json").json
    assert here.ok("evidence", "checkpoint").out == (
        f"checkpoint 1: {made['entries']} entries in 1 stream, {made['digest']}\n"
    )
    assert here.ok("evidence", "verify", "--checkpoint", made["digest"]).status == 0


def test_a_tail_that_was_cut_with_its_checkpoints_shows_where_they_were_seen(here, own_api, actor):
    here.ok("evidence", "checkpoint")
    registered_policy(own_api.service, actor)
    here.ok("evidence", "checkpoint")
    assert "held against checkpoint" in here.ok("evidence", "verify").err
    with own_api.service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("DELETE FROM checkpoints WHERE number = 2"))
        session.execute(text("DELETE FROM entries WHERE kind = 'policy_registered'"))
        session.execute(text("DELETE FROM project_documents"))
        session.execute(text("UPDATE project_usage SET documents = 0"))
        session.execute(text("SET LOCAL session_replication_role = origin"))
    with Client(own_api.url, own_api.tokens["engineer"]) as client:
        assert client.evidence.verify().verified  # by itself the service has forgotten it
    ran = here("evidence", "verify")
    assert ran.status == 1
    assert "is not there" in ran.out
    # Whoever never saw it cannot know; what is verified there is remembered from then on.
    (here.home / "config" / "sluicegate" / "checkpoints.json").write_text("{}")
    here.ok("evidence", "verify")
    assert "held against checkpoint" in here.ok("evidence", "verify").err
