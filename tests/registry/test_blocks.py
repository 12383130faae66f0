"""Files are taken into a store in blocks: whole ones past the page cache, the rest the usual way, and all are right."""

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest

from registry.storage.blocks import BLOCK_BYTES, COUNT, Blocks
from registry.storage.local import LocalBlobs
from schemas.common import sha256_digest
from schemas.problems import DigestMismatch, TooLarge
from tests.support.disk import small_disk

CONTENT = random.Random(3).randbytes((COUNT + 2) * BLOCK_BYTES + 4097)
SIZES = (0, 1, 4095, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, COUNT * BLOCK_BYTES, len(CONTENT))


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "incoming").iterdir()]


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    """A store where files can be written past the page cache, and one where that may not be."""
    if request.param == "disk":
        yield LocalBlobs(tmp_path / "store")
        return
    with small_disk(tmp_path / "disk", "64m") as disk:
        yield LocalBlobs(disk.path)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_is_taken_whole(store, tmp_path, size):
    source, raw, told = tmp_path / "source", CONTENT[:size], []
    source.write_bytes(raw)
    assert store.take(source, sha256_digest(raw), limit=size, moved=told.append) == size
    path = store.path(sha256_digest(raw))
    assert path.read_bytes() == raw
    assert (path.stat().st_mode & 0o777, told[-1]) == (0o444, size)
    assert left_in(path.parents[2]) == []


def test_blocks_are_written_in_order_behind_what_is_there_also_where_that_is_no_whole_sector(tmp_path):
    for before in (b"", b"x", bytes(4096), bytes(BLOCK_BYTES)):
        file = tmp_path / f"{len(before)}"
        file.write_bytes(before)
        with file.open("r+b", buffering=0) as target, (tmp_path / "source").open("w+b", buffering=0) as source:
            source.write(CONTENT)
            source.seek(0)
            with Blocks(target, len(before)) as blocks:
                while block := blocks.fill(source):
                    blocks.write(block)
                blocks.end()
            assert not fcntl.fcntl(target, fcntl.F_GETFL) & os.O_DIRECT
        assert file.read_bytes() == before + CONTENT


def test_a_source_that_comes_in_small_pieces_is_read_to_its_end(store, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def feed():
        with pipe.open("wb", buffering=0) as file:
            for start in range(0, len(CONTENT), 70_001):
                file.write(CONTENT[start : start + 70_001])

    thread = threading.Thread(target=feed)
    thread.start()
    with pipe.open("rb", buffering=0) as source, store.stage() as staged:
        staged.draw(source, limit=len(CONTENT))
        staged.seal(sha256_digest(CONTENT))
        staged.place()
    thread.join()
    assert store.is_intact(sha256_digest(CONTENT))


@pytest.mark.parametrize("room", ["1m", "3m", "5m", "13m"])
def test_a_disk_that_fills_up_at_any_block_is_told_and_leaves_nothing(tmp_path, room):
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    with small_disk(tmp_path / "disk", room) as disk:
        store = LocalBlobs(disk.path)
        with pytest.raises(OSError, match="No space") as refused:
            store.take(source, sha256_digest(CONTENT), limit=len(CONTENT))
        assert refused.value.errno == errno.ENOSPC
        assert left_in(disk.path) == []
        assert not store.exists(sha256_digest(CONTENT))


def test_a_disk_that_takes_nothing_past_the_page_cache_after_all_gets_it_the_usual_way(tmp_path, monkeypatch):
    """Some say so only when they are written to."""
    refused, write = [], os.pwrite

    def refusing(descriptor, block, at):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, block, at)

    store, source = LocalBlobs(tmp_path / "store"), tmp_path / "source"
    source.write_bytes(CONTENT)
    monkeypatch.setattr("registry.storage.blocks.os.pwrite", refusing)
    store.take(source, sha256_digest(CONTENT), limit=len(CONTENT))
    assert store.path(sha256_digest(CONTENT)).read_bytes() == CONTENT
    assert refused
    assert max(refused) < COUNT * BLOCK_BYTES  # once it is known, nobody asks again


def test_a_write_that_fails_behind_the_last_block_that_was_read_is_told(tmp_path):
    with (tmp_path / "file").open("w+b", buffering=0) as writable, (tmp_path / "source").open("w+b") as source:
        source.write(b"x")
        source.seek(0)
        with os.fdopen(os.open(writable.name, os.O_RDONLY), "rb") as target, Blocks(target, 0) as blocks:
            blocks.write(blocks.fill(source))
            with pytest.raises(OSError, match="Bad file"):
                blocks.end()


def shares(source: Path) -> object:
    """Return what a kernel does that lets files share blocks, with a source that is written to right afterwards."""

    def asked(target: int, request: int, shared: int) -> int:
        assert request == 0x40049409
        os.write(target, os.pread(shared, len(CONTENT), 0))
        source.write_bytes(b"x" * source.stat().st_size)
        return 0

    return asked


def test_of_shared_blocks_what_is_kept_counts_and_not_what_the_source_has_become(tmp_path, monkeypatch):
    store, source, raw = LocalBlobs(tmp_path / "store"), tmp_path / "source", CONTENT[:5000]
    monkeypatch.setattr("registry.storage.incoming.fcntl.ioctl", shares(source))
    source.write_bytes(raw)
    assert store.take(source, sha256_digest(raw), limit=5000) == 5000
    assert store.path(sha256_digest(raw)).read_bytes() == raw
    changed = CONTENT[5000:10_000]
    source.write_bytes(changed)
    with pytest.raises(DigestMismatch):
        store.take(source, sha256_digest(b"x" * 5000), limit=5000)
    source.write_bytes(changed)
    with pytest.raises(TooLarge):
        store.take(source, sha256_digest(changed), limit=4999)
    assert left_in(tmp_path / "store") == []
