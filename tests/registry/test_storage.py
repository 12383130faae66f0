"""One suite for every store of blobs: a folder, and a bucket of a real S3 server."""

import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import pytest

from registry.storage.local import LocalBlobs
from registry.storage.s3 import S3Blobs
from schemas.common import sha256_digest
from schemas.problems import DigestMismatch, NotFound, TooLarge

SMALL = b"some bytes of a model" * 1000
LARGE = random.Random(3).randbytes(11 << 20)
"""More than goes in one request."""
LIMIT = 1 << 30


class Folder:
    """A store in a folder, and a way to look behind it."""

    def __init__(self, path) -> None:
        self.path = path
        self.store = LocalBlobs(path)

    def again(self):
        return LocalBlobs(self.path)

    def damage(self, digest, raw):
        path = self.store.path(digest)
        path.chmod(0o644)
        path.write_bytes(raw)

    def names(self):
        """What is in the store, by the place of each, and what is on its way."""
        found = (path for path in self.path.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def state(self, digest):
        found = self.store.path(digest).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns  # reading it changes the access time

    def stray(self, name):
        (self.path / "sha256" / "ab").mkdir(exist_ok=True)
        (self.path / "sha256" / "ab" / name).write_bytes(b"x")


class Prefix:
    """The same in a bucket."""

    def __init__(self, path, server, bucket) -> None:
        self.path, self.server, self.bucket, self.root = path, server, bucket, f"{server.place()}/of-us"
        self.store = self.again()

    def again(self):
        return S3Blobs(self.bucket, f"{self.root}/", self.path, part_bytes=5 << 20)

    def damage(self, digest, raw):
        self.server.client.put_object(Bucket=self.server.bucket, Key=self.store.key(digest), Body=raw)

    def names(self):
        there = [key.removeprefix(f"{self.root}/") for key in self.server.keys(self.root)]
        arriving = [f"incoming/{path.name}" for path in (self.path / "incoming").iterdir()]
        return sorted([*there, *arriving, *(f"upload {key}" for key in self.server.uploads(self.root))])

    def state(self, digest):
        found = self.server.client.head_object(Bucket=self.server.bucket, Key=self.store.key(digest))
        return found["LastModified"], found["ETag"]

    def stray(self, name):
        self.server.client.put_object(Bucket=self.server.bucket, Key=f"{self.root}/sha256/ab/{name}", Body=b"x")


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path) -> Folder | Prefix:
    if request.param == "folder":
        return Folder(tmp_path / "blobs")
    server, bucket = (request.getfixturevalue(name) for name in ("s3_server", "s3_bucket"))
    return Prefix(tmp_path / "blobs", server, bucket)


@pytest.fixture
def store(place):
    return place.store


def named(raw: bytes) -> str:
    hexadecimal = sha256_digest(raw).removeprefix("sha256:")
    return f"sha256/{hexadecimal[:2]}/{hexadecimal}"


def pieces(raw: bytes, size: int = 1 << 20) -> Iterator[bytes]:
    return (raw[start : start + size] for start in range(0, len(raw), size))


@pytest.mark.parametrize("raw", [b"", b"x", SMALL, LARGE], ids=["empty", "byte", "small", "large"])
def test_bytes_come_back_as_they_were_put(place, store, raw):
    digest = sha256_digest(raw)
    assert not store.exists(digest)
    assert store.put(pieces(raw), digest, limit=LIMIT) == len(raw)
    assert store.exists(digest)
    assert store.is_intact(digest)
    for is_verified in (False, True):
        with store.open(digest, is_verified=is_verified) as file:
            first = file.read(7)
            assert first + file.read() == raw
            assert file.read(1) == b""
    assert place.names() == [named(raw)]


@pytest.mark.parametrize("raw", [SMALL, LARGE], ids=["small", "large"])
def test_putting_what_is_there_changes_nothing(place, store, raw):
    store.put(pieces(raw), sha256_digest(raw), limit=LIMIT)
    before = place.state(sha256_digest(raw))
    time.sleep(0.01)
    assert store.put(pieces(raw), sha256_digest(raw), limit=LIMIT) == len(raw)
    assert place.state(sha256_digest(raw)) == before
    assert place.names() == [named(raw)]


@pytest.mark.parametrize(
    ("raw", "damaged"), [(SMALL, SMALL[:-1] + b"?"), (SMALL, b""), (LARGE, LARGE[:5])], ids=["byte", "all", "end"]
)
def test_damage_is_noticed_and_a_new_put_mends_it(place, store, raw, damaged):
    digest = sha256_digest(raw)
    store.put(pieces(raw), digest, limit=LIMIT)
    place.damage(digest, damaged)
    assert not store.is_intact(digest)
    with store.open(digest, is_verified=True) as file, pytest.raises(DigestMismatch):
        list(iter(lambda: file.read(1 << 20), b""))
    assert displaces(store, raw)
    assert not store.is_intact(digest)  # sealing changes nothing
    assert store.put(pieces(raw), digest, limit=LIMIT) == len(raw)
    assert store.is_intact(digest)
    assert not displaces(store, raw)
    assert place.names() == [named(raw)]


def displaces(store, raw):
    with store.stage() as staged:
        staged.write(raw, limit=LIMIT)
        staged.seal(sha256_digest(raw))
        return staged.displaces


def test_what_comes_for_the_first_time_displaces_nothing(store):
    assert not displaces(store, SMALL)


def broken():
    yield SMALL[:100]
    raise ConnectionError


@pytest.mark.parametrize(
    ("chunks", "limit", "error"),
    [
        ([SMALL[:-1]], LIMIT, DigestMismatch),
        ([SMALL, b"!"], LIMIT, DigestMismatch),
        ([], LIMIT, DigestMismatch),
        ([SMALL], len(SMALL) - 1, TooLarge),
        (None, LIMIT, ConnectionError),
    ],
)
def test_what_is_not_whole_and_right_leaves_nothing(place, store, chunks, limit, error):
    with pytest.raises(error):
        store.put(broken() if chunks is None else chunks, sha256_digest(SMALL), limit=limit)
    assert not store.exists(sha256_digest(SMALL))
    assert place.names() == []


def test_wrong_bytes_do_not_touch_a_blob_that_is_there(place, store):
    digest = sha256_digest(SMALL)
    store.put([SMALL], digest, limit=LIMIT)
    with pytest.raises(DigestMismatch) as refused:
        store.put([b"other"], digest, limit=LIMIT)
    assert refused.value.members == {"expected": digest, "received": sha256_digest(b"other"), "size": 5}
    assert store.is_intact(digest)


def test_nothing_shows_before_the_bytes_are_placed(place, store):
    digest = sha256_digest(LARGE)
    with store.stage() as staged:
        staged.write(LARGE, limit=LIMIT)
        staged.seal(digest)
        assert not store.exists(digest)
        assert list(store.digests(time.time() + 3600)) == []
        staged.place()
        assert store.is_intact(digest)
        staged.place()
    assert place.names() == [named(LARGE)]


def test_what_was_sealed_and_not_placed_leaves_nothing(place, store):
    for raw in (SMALL, LARGE):
        with store.stage() as staged:
            staged.write(raw, limit=LIMIT)
            staged.seal(sha256_digest(raw))
    assert place.names() == []


def test_bytes_that_are_not_sealed_are_never_placed(place, store):
    with store.stage() as staged:
        staged.write(SMALL, limit=LIMIT)
        with pytest.raises(ValueError, match="sealed"):
            staged.place()
        with pytest.raises(DigestMismatch):
            staged.seal(sha256_digest(b"other"))
        with pytest.raises(ValueError, match="sealed"):
            staged.place()
    assert place.names() == []


def test_a_blob_that_went_between_sealing_and_placing_is_placed_all_the_same(place, store):
    digest = sha256_digest(LARGE)
    store.put([LARGE], digest, limit=LIMIT)
    with store.stage() as staged:
        staged.write(LARGE, limit=LIMIT)
        staged.seal(digest)
        store.remove(digest)
        staged.place()
    assert store.is_intact(digest)


@pytest.mark.parametrize("raw", [SMALL, LARGE], ids=["small", "large"])
def test_an_upload_in_pieces_goes_on_in_another_process_and_survives_a_kill_after_placing(place, store, raw):
    upload, digest, half = uuid4(), sha256_digest(raw), len(raw) // 2
    with store.part(upload) as part:
        part.write(raw[:half], limit=LIMIT)
        assert store.part(upload) is None
    other = place.again()
    assert (other.received(upload), other.silence(upload) < 3600) == (half, True)
    for _ in range(2):
        # Placed, and killed before that was recorded: the part is there still, and the same is done again.
        with other.part(upload) as part:
            part.write(raw[part.size :], limit=LIMIT)
            part.seal(digest)
            part.place()
        assert store.is_intact(digest)
    other.drop(upload)
    assert (other.received(upload), other.silence(upload)) == (0, float("inf"))
    assert place.names() == [named(raw)]


def test_an_upload_in_pieces_with_wrong_bytes_is_refused(place, store):
    upload, wrong = uuid4(), LARGE[:-1] + b"!"
    for piece in (wrong[:1000], wrong[1000:]):
        with store.part(upload) as part:
            part.write(piece, limit=LIMIT)
            if part.size == len(LARGE):
                with pytest.raises(DigestMismatch):
                    part.seal(sha256_digest(LARGE))
    store.drop(upload)
    assert place.names() == []


@pytest.mark.parametrize(
    "name", ["", "sha256:", "../../etc/passwd", sha256_digest(b"") + "\n", "sha256:" + "A" * 64, "sha256:" + "g" * 64]
)
def test_what_is_no_digest_names_nothing(store, name):
    for call in (store.open, store.exists, store.is_intact, store.remove):
        with pytest.raises(ValueError, match="named sha256"):
            call(name)


@pytest.mark.parametrize("raw", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_a_file_of_this_machine_is_taken_verified_and_stays_apart_from_the_blob(tmp_path, raw):
    place, source, counts = Folder(tmp_path / "blobs"), tmp_path / "source", []
    source.write_bytes(raw)
    assert place.store.take(source, sha256_digest(raw), limit=len(raw), moved=counts.append) == len(raw)
    assert counts[-1] == len(raw)
    source.write_bytes(b"other bytes")
    assert place.store.is_intact(sha256_digest(raw))
    assert place.names() == [named(raw)]


def test_a_file_of_this_machine_that_is_not_right_leaves_nothing(tmp_path):
    place, source, link = Folder(tmp_path / "blobs"), tmp_path / "source", tmp_path / "link"
    source.write_bytes(SMALL)
    link.symlink_to(source)

    def stop(_):
        raise InterruptedError

    digest = sha256_digest(SMALL)
    for path, asked, changes, error in (
        (source, sha256_digest(b"other"), {}, DigestMismatch),
        (source, digest, {"limit": len(SMALL) - 1}, TooLarge),
        (source, digest, {"moved": stop}, InterruptedError),
        (link, digest, {}, OSError),
        (tmp_path / "absent", digest, {}, OSError),
    ):
        with pytest.raises(error):
            place.store.take(path, asked, **({"limit": LIMIT} | changes))
    assert place.names() == []


def test_a_blob_that_is_not_there_is_not_found_and_removing_it_changes_nothing(store):
    digest = sha256_digest(SMALL)
    assert not store.exists(digest)
    assert not store.is_intact(digest)
    with pytest.raises(NotFound):
        store.open(digest)
    store.remove(digest)


def test_one_blob_put_by_many_at_once_is_whole(place, store):
    digest = sha256_digest(SMALL)
    threads = [threading.Thread(target=store.put, args=([SMALL], digest), kwargs={"limit": LIMIT}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.is_intact(digest)
    assert place.names() == [named(SMALL)]


def test_blobs_are_listed_in_order_with_their_age_and_what_is_lost_is_named(place, store):
    raws = [f"blob {number}".encode() for number in range(20)]
    digests = sorted(map(sha256_digest, raws))
    for raw in raws:
        store.put([raw], sha256_digest(raw), limit=LIMIT)
    for name in ("not-a-digest", "c" * 64):  # no digest, and one at another's place
        place.stray(name)
    soon = time.time() + 60
    assert list(store.digests(soon)) == digests
    assert list(store.digests(time.time() - 3600)) == []
    assert store.lost(digests) == []
    assert store.lost([]) == []
    for digest in (digests[0], digests[7], digests[-1]):
        store.remove(digest)
    absent = sorted([sha256_digest(b"never"), digests[0], digests[7], digests[-1]])
    assert store.lost(sorted([*digests, sha256_digest(b"never")])) == absent
    store.check()


def test_what_a_crash_left_on_this_machine_is_removed_once_it_is_old(place, store):
    incoming = place.path / "incoming"
    for name, age in (("old", timedelta(days=2)), ("new", timedelta(0)), (f"{uuid4()}.part", timedelta(days=2))):
        (incoming / name).write_bytes(b"part")
        since = (incoming / name).stat().st_mtime - age.total_seconds()
        os.utime(incoming / name, (since, since))
    assert store.discard_abandoned(24 * 3600.0, 72 * 3600.0) == 1
    assert store.discard_abandoned(24 * 3600.0) == 1
    assert place.names() == ["incoming/new"]


def test_parts_that_a_crash_left_in_the_bucket_are_removed_once_they_are_old(s3_server, s3_bucket, tmp_path):
    place = Prefix(tmp_path / "blobs", s3_server, s3_bucket)
    bucket, key, other = place.store.bucket, place.store.key(sha256_digest(LARGE)), f"{place.root}/somebody-else"
    upload, elsewhere = bucket.begin(key), bucket.begin(other)
    bucket.part(key, upload, 1, LARGE[: 5 << 20])
    assert place.store.discard_abandoned(3600.0) == 0
    assert place.names() == [f"upload {key}", f"upload {other}"]
    # The server tells whole seconds.
    while time.time() < next(bucket.unfinished(key)).touched.timestamp() + 1:
        time.sleep(0.05)
    assert place.store.discard_abandoned(0.0) == 1
    assert place.names() == [f"upload {other}"]
    bucket.abort(other, elsewhere)
