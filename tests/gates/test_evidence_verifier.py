"""The one verifier of evidence, on archives: nothing that was altered, removed or put elsewhere passes."""

import io
import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from gates import archive
from gates.evidence import ALGORITHM, Key, Record, claim_of, entry_problems, key_id_of
from registry.keys import Signer
from schemas.common import canonical_json, sha256_digest
from schemas.evidence import GENESIS, PREDICATE_BASE, STATEMENT_TYPE, KeyRotated, Kind
from tests.support.archives import PROJECT, Story, ended, small, tiny

GOLDEN = Path(__file__).parents[1] / "golden"
SEALS = f"checkpoints/{PROJECT}"


def verify(raw, pinned=None):
    return archive.verify(io.BytesIO(raw), pinned=pinned)


def problems(raw, pinned=None):
    found = verify(raw, pinned)
    assert not found.verified
    return {(fault.stream, fault.position, fault.problem) for fault in found.faults}


def test_what_nobody_touched_is_verified():
    story = small()
    found = verify(story.archive(), [story.signer.key_id])
    assert found.faults == []
    assert found.verified
    assert (found.entries, found.streams, found.checkpoints, found.sealed) == (4, 3, 2, 4)


def test_every_altered_byte_is_found():
    """Each byte of an archive, each in one of three ways."""
    raw = tiny().archive()
    assert verify(raw).verified
    for place in range(len(raw)):
        altered = bytearray(raw)
        altered[place] ^= (0x01, 0x20, 0x80)[place % 3]
        assert not verify(bytes(altered)).verified, place


def test_every_byte_that_was_altered_by_whoever_mends_the_last_line_is_found_too():
    """The last line is no protection against a person: signatures and digests are. Only the project's name is free."""
    story = tiny()
    lines = story.archive().splitlines(keepends=True)[:-1]
    head = b'{"archive":{"format":"sluicegate.dev/evidence-archive/v1","name":"'
    assert lines[0].startswith(head)
    pinned = [story.signer.key_id]
    for number, line in enumerate(lines):
        for place in range(number % 4, len(line) - 1, 4):
            if number == 0 and len(head) <= place < len(head) + len("default"):
                continue
            altered = bytearray(line)
            altered[place] ^= 0x01
            raw = ended([*lines[:number], bytes(altered), *lines[number + 1 :]])
            assert not verify(raw, pinned).verified, (number, place)


def test_a_removed_or_repeated_line_is_found():
    story = small()
    lines = story.archive().splitlines(keepends=True)[:-1]
    for number in range(len(lines)):
        assert not verify(ended(lines[:number] + lines[number + 1 :])).verified, number
        assert not verify(ended([*lines[:number], lines[number], *lines[number:]])).verified, number


def test_any_two_lines_that_changed_places_are_found():
    story = small()
    lines = story.archive().splitlines(keepends=True)[:-1]
    for first in range(len(lines)):
        for second in range(first + 1, len(lines)):
            mixed = list(lines)
            mixed[first], mixed[second] = mixed[second], mixed[first]
            assert not verify(ended(mixed)).verified, (first, second)


def test_an_archive_that_was_cut_anywhere_is_found():
    raw = small().archive()
    for length in range(0, len(raw), 23):
        assert not verify(raw[:length]).verified, length
    assert not verify(raw + b" ").verified
    assert not verify(raw + raw).verified


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}\n", b"[]\n", b"\x00" * 100, b"not an archive\n", b'{"end":{}}\n'])
def test_what_is_no_archive_is_not_verified(raw):
    assert not verify(raw).verified


def test_random_bytes_never_break_the_verifier():
    raw, chance = small().archive(), random.Random(7)
    for _ in range(300):
        altered = bytearray(raw)
        for _ in range(chance.randrange(1, 40)):
            altered[chance.randrange(len(altered))] = chance.randrange(256)
        assert not verify(bytes(altered)).verified


# ----------------------------------------------------------------------------------------- what is named


def test_a_cut_tail_is_named():
    story = small()
    story.entries = [entry for entry in story.entries if (entry.stream, entry.position) != ("release/a", 2)]
    assert ("release/a", 0, "it was cut: it has 1 entries, and checkpoint 2 sealed 2") in problems(story.archive())


def test_a_removed_stream_is_named():
    story = small()
    story.entries = [entry for entry in story.entries if entry.stream != "release/b"]
    assert ("release/b", 0, "the stream was removed, and checkpoint 2 sealed 1") in problems(story.archive())


def test_a_removed_checkpoint_and_what_it_covered_is_named():
    story = small()
    del story.envelopes[0]
    found = problems(story.archive())
    assert (SEALS, 2, "checkpoint 1 is missing") in found
    assert (SEALS, 2, "it does not name the checkpoint before it") in found


def test_an_archive_without_checkpoints_is_not_verified():
    story = small()
    story.envelopes = []
    assert any("no checkpoint covers its last entries" in problem for _, _, problem in problems(story.archive()))


def test_an_older_archive_lacks_the_checkpoint_that_somebody_kept():
    story = small()
    kept = sha256_digest(story.envelopes[1])
    whole = story.archive()
    assert archive.verify(io.BytesIO(whole), must_have=kept).verified
    del story.envelopes[1]
    story.entries = [entry for entry in story.entries if entry.sequence <= 2]
    older = story.archive()
    assert verify(older).verified
    found = archive.verify(io.BytesIO(older), must_have=kept)
    assert [(fault.stream, fault.problem) for fault in found.faults] == [(SEALS, f"checkpoint {kept} is not there")]


def test_a_missing_and_a_planted_document_are_named():
    story = small()
    (document,) = story.documents
    story.documents = []
    assert any(problem == f"policy {document.digest} is missing" for _, _, problem in problems(story.archive()))
    other = small()
    other.documents.append(document.model_copy(update={"document": {"a": "b"}}))
    said = {problem for _, _, problem in problems(other.archive())}
    assert f"document {document.digest} does not have its digest" in said


def test_an_entry_that_was_signed_after_its_key_had_ended_is_named():
    story = Story()
    story.add("release/a", "1")
    story.end(story.signer.key_id, story.now)
    story.add("release/a", "2")
    story.seal()
    found = problems(story.archive())
    assert ("release/a", 2, "it was signed outside its key's validity") in found
    assert (SEALS, 1, "it was signed outside its key's validity") in found
    assert not any(position == 1 and stream == "release/a" for stream, position, _ in found)


def test_a_checkpoint_of_another_project_or_with_streams_out_of_order_is_named():
    story = Story()
    story.add("release/a", "1")
    story.add("release/b", "1")
    story.seal(made_by="x")
    good = verify(story.archive())
    assert good.verified
    other = Story()
    other.add("release/a", "1")
    other.seal(project=other.entries[0].id)
    assert (SEALS, 1, "the checkpoint is of another project") in problems(other.archive())


# --------------------------------------------------------------------------------------------------- trust


def rotated(story, *, introduces=True):
    """Let another key take over, introduced by the old one or not."""
    new = Signer(ec.generate_private_key(ec.SECP256R1()))
    at = story.now + timedelta(seconds=1)
    until = at + timedelta(minutes=1)
    old = story.signer
    story.now = at
    story.enroll(new)
    if introduces:
        body = KeyRotated(
            key_id=new.key_id, public_key_pem=new.public_key_pem, valid_from=at, retired=old.key_id,
            valid_until=until, reason="yearly",
        )  # fmt: skip
        story.add(f"project/{PROJECT}", f"key:{new.key_id}", Kind.KEY_ROTATED, body)
        story.end(old.key_id, until)
    story.signer = new
    story.add("release/a", "after")
    story.seal()
    return old, new


def test_a_key_hands_its_trust_on_to_the_one_that_it_introduces():
    story = small()
    old, new = rotated(story)
    assert verify(story.archive(), [old.key_id]).faults == []
    assert verify(story.archive()).verified
    # What the new one alone is trusted with does not vouch for what was before it.
    untrusted = {problem.split(" ")[1] for _, _, problem in problems(story.archive(), [new.key_id])}
    assert untrusted == {old.key_id}


def test_a_key_that_nobody_introduced_is_not_trusted():
    story = small()
    old, new = rotated(story, introduces=False)
    assert verify(story.archive()).verified
    found = problems(story.archive(), [old.key_id])
    assert found == {
        (SEALS, 3, f"key {new.key_id} signed here, and neither is it trusted nor did a trusted key introduce it")
    }


def test_an_archive_that_was_written_anew_with_another_key_fails_under_the_pinned_one():
    story = small()
    forged = small()
    assert verify(forged.archive()).verified
    found = problems(forged.archive(), [story.signer.key_id])
    assert {problem.split(" ")[1] for _, _, problem in found} == {forged.signer.key_id}


@pytest.mark.parametrize("field", ["valid_from", "valid_until"])
def test_a_rotation_says_what_the_keys_must_be(field):
    story = small()
    old, new = rotated(story)
    moved = story.keys[1 if field == "valid_from" else 0]
    other = moved.model_copy(
        update={field: getattr(moved, field) + timedelta(seconds=-1 if field == "valid_from" else 1)}
    )
    story.keys = [other if key.key_id == moved.key_id else key for key in story.keys]
    name, said = (new, "is not the one that was put in place") if field == "valid_from" else (
        old, "does not end when it was retired",
    )  # fmt: skip
    assert (f"project/{PROJECT}", 1, f"key {name.key_id} {said}") in problems(story.archive())


def test_public_keys_are_read_from_a_file_of_one_or_several():
    first, second = (Signer(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
    text = f"# ours\n{first.public_key_pem}\r\n{second.public_key_pem}".replace("\n", "\r\n")
    assert archive.public_keys(text) == {first.key_id: first.public_key_pem, second.key_id: second.public_key_pem}
    assert key_id_of(first.public_key_pem) == first.key_id
    for wrong in ("", "hello", first.public_key_pem.replace("M", "N")):
        with pytest.raises(ValueError, match="public key"):
            archive.public_keys(wrong)


def test_a_statement_of_another_type_than_its_kind_is_no_claim():
    signer = Signer(ec.generate_private_key(ec.SECP256R1()))
    claim = {"stream": "a/b", "act": "1", "kind": "paused", "actor": "m", "stated_at": "x", "body": {"reason": "y"}}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "bundle", "digest": {"sha256": "0" * 64}}],
        "predicateType": f"{PREDICATE_BASE}promoted/v1",
        "predicate": claim,
    }
    raw = canonical_json(signer.sign(canonical_json(statement)).model_dump(mode="json", by_alias=True))
    with pytest.raises(ValueError, match="another type"):
        claim_of(raw)


@pytest.mark.parametrize(
    ("respell", "said"),
    [
        (lambda raw: raw, None),
        (lambda raw: raw.replace(b'":', b'": ', 1), "its envelope is not canonical"),
        (lambda raw: raw + b"\n", "its envelope is not canonical"),
        (lambda raw: raw.replace(b'"payload":"e', b'"payload":"\\u0065'), "its envelope is not canonical"),
        (lambda raw: raw.replace(b"application/", b"application\\/"), "its envelope is not canonical"),
        (lambda raw: b'{"payload":"x",' + raw[1:], "its envelope cannot be read: has the key 'payload' twice"),
        (lambda raw: raw.replace(b'"signatures"', b'"more":1,"signatures"'), "its envelope cannot be read"),
    ],
)
def test_an_envelope_has_one_spelling_and_no_reader_is_quick_enough_to_take_another(respell, said):
    signer = Signer(ec.generate_private_key(ec.SECP256R1()))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    claim = {"stream": "a/b", "act": "1", "kind": "paused", "actor": "m", "stated_at": "x", "body": {"reason": "y"}}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "bundle", "digest": {"sha256": "0" * 64}}],
        "predicateType": f"{PREDICATE_BASE}paused/v1",
        "predicate": claim,
    }
    raw = respell(canonical_json(signer.sign(canonical_json(statement)).model_dump(mode="json", by_alias=True)))
    record = Record(1, UUID(int=1), UUID(int=2), "a/b", 1, "1", "paused", "m", at, raw, GENESIS, "", signer.key_id)
    key = Key(signer.key_id, ALGORITHM, signer.public_key_pem, at, None)
    found = entry_problems(replace(record, entry_digest=record.link()), 1, GENESIS, key)
    assert found == [] if said is None else found[0].startswith(said)


# -------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
def test_the_evidence_of_every_released_version_is_verified_for_ever(version):
    folder = GOLDEN / version
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    raw = (folder / "evidence.jsonl").read_bytes()
    pinned = archive.public_keys((folder / "trusted.pem").read_text("utf-8"))
    found = verify(raw, pinned.keys())
    assert found.faults == []
    assert found.verified
    assert (found.entries, found.streams, found.checkpoints) == (
        expected["entries"], expected["streams"], expected["checkpoints"],
    )  # fmt: skip
    chance = random.Random(version)
    for place in (chance.randrange(len(raw)) for _ in range(25)):
        altered = bytearray(raw)
        altered[place] ^= 0x01
        assert not verify(bytes(altered), pinned.keys()).verified, place


def test_golden_evidence_holds_the_kinds_that_it_says():
    raw = (GOLDEN / "0.1.0" / "evidence.jsonl").read_text("utf-8")
    found = {line["entry"]["kind"] for line in map(json.loads, raw.splitlines()) if "entry" in line}
    assert found == {str(kind) for kind in json.loads((GOLDEN / "0.1.0" / "expected.json").read_text())["kinds"]}
