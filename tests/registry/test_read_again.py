"""`evidence verify --blobs`: every stored byte that evidence names is read again."""

from registry.cli import evidence as cli_evidence
from schemas.common import sha256_digest


def test_blobs_that_entries_name_are_read_again_and_what_is_wrong_is_named_with_who_needs_it(scene, monkeypatch):
    monkeypatch.setattr(cli_evidence, "TOLD_SECONDS", 0.0)
    ran = scene.command("evidence", "verify", "--blobs", "--json")
    assert (ran.status, ran.json["verified"]) == (0, True)
    count = len(scene.bundle.files)
    assert f"read 1 of {count} blob" in ran.err
    assert ran.err.endswith("nothing wrong\n")
    blob, stream = scene.bundle.files[0].sha256, f"documents/{scene.api.project_id}/{scene.bundle.digest}"
    path = scene.service.blobs.path(blob)
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + b"?")
    # What is verified without it says nothing of bytes.
    assert scene.command("evidence", "verify").status == 0
    ran = scene.command("evidence", "verify", "--blobs", "--json")
    assert (ran.status, ran.json["verified"]) == (1, False)
    (fault,) = ran.json["faults"]
    assert (fault["stream"], fault["position"]) == (stream, 1)
    assert fault["problem"] == f"its blob {blob} has the bytes of {sha256_digest(content[:-1] + b'?')}"
    path.unlink()
    ran = scene.command("evidence", "verify", "--blobs")
    assert ran.status == 1
    assert "is missing" in ran.out
    # A release's own entries name records, and nothing of the bundle.
    assert scene.command("evidence", "verify", "--stream", stream, "--blobs").status == 1
    path.write_bytes(content)
    assert scene.command("evidence", "verify", "--blobs").status == 0
    assert scene.command("evidence", "verify", "--archive", path, "--blobs").status == 2
