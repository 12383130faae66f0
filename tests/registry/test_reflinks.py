"""On a file system that can share bytes, a blob is its source's bytes until somebody writes to the source."""

import hashlib
import os
import shutil
import subprocess

import pytest

from registry.storage.local import LocalBlobs
from schemas.problems import DigestMismatch, TooLarge

MEGABYTES = 24
CONTENT = os.urandom(1 << 20) * MEGABYTES
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MISSING = "not run: sharing bytes takes root, Btrfs in the kernel, and Debian's package btrfs-progs"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """A small Btrfs in a file, mounted for this module."""
    folder = tmp_path_factory.mktemp("btrfs")
    image, place = folder / "image", folder / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(192 << 20)
    if os.getuid() or shutil.which("mkfs.btrfs") is None:
        pytest.skip(MISSING)
    subprocess.run(["mkfs.btrfs", "-q", "-m", "single", image], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop,noatime", image, place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"{MISSING}: {mounted.stderr.decode(errors='replace').strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def place(sharing, tmp_path):
    made = sharing / tmp_path.name
    made.mkdir()
    (made / "source").write_bytes(CONTENT)
    yield made
    shutil.rmtree(made)


def used(folder):
    """Bytes of the file system that are in use, once everything is on it."""
    subprocess.run(["sync", "--file-system", folder], check=True)
    told = os.statvfs(folder)
    return (told.f_blocks - told.f_bfree) * told.f_frsize


def names(store):
    return [path for path in store.folder.parent.rglob("*") if path.is_file()]


def test_a_blob_takes_no_room_of_its_own_and_keeps_its_bytes_when_the_source_changes(place):
    store, before = LocalBlobs(place), used(place)
    told = []
    assert store.take(place / "source", DIGEST, limit=len(CONTENT), moved=told.append) == len(CONTENT)
    assert used(place) - before < len(CONTENT) // 4
    assert told == [len(CONTENT)]
    with (place / "source").open("r+b") as source:
        source.write(b"x" * 4096)
    assert store.is_intact(DIGEST)
    assert store.path(DIGEST).stat().st_ino != (place / "source").stat().st_ino
    assert store.path(DIGEST).stat().st_mode & 0o777 == 0o444


def test_shared_bytes_of_another_digest_are_refused_and_leave_nothing(place):
    store = LocalBlobs(place)
    (place / "source").write_bytes(CONTENT[:-1] + b"\0")
    with pytest.raises(DigestMismatch):
        store.take(place / "source", DIGEST, limit=len(CONTENT))
    assert names(store) == [place / "source"]


def test_more_bytes_than_allowed_are_refused_and_leave_nothing(place):
    store = LocalBlobs(place)
    with pytest.raises(TooLarge):
        store.take(place / "source", DIGEST, limit=len(CONTENT) - 1)
    assert names(store) == [place / "source"]


def test_from_another_file_system_the_bytes_are_copied(place, tmp_path):
    (tmp_path / "source").write_bytes(CONTENT)
    store, before = LocalBlobs(place), used(place)
    assert store.take(tmp_path / "source", DIGEST, limit=len(CONTENT)) == len(CONTENT)
    assert used(place) - before >= len(CONTENT) * 3 // 4
    assert store.is_intact(DIGEST)
