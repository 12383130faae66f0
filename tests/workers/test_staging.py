import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from gates import integrity
from registry.storage.local import LocalBlobs
from schemas.bundle import Bundle, Role
from schemas.problems import DigestMismatch, TooLarge
from tests.support import chain
from workers import staging
from workers.staging import Staging

ENVIRONMENT = "sha256:" + "0" * 64
README = b"# CHAIN\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return chain.write_bundle_directory(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def bundle(source) -> Bundle:
    plain = chain.describe(source, environment=ENVIRONMENT)
    deep = {
        "path": "docs/en/README.md",
        "size": len(README),
        "sha256": "sha256:" + hashlib.sha256(README).hexdigest(),
        "role": Role.DOCUMENTATION,
    }
    files = [file.model_dump() for file in plain.files]
    return chain.describe(source, environment=ENVIRONMENT, files=sorted([*files, deep], key=lambda file: file["path"]))


@pytest.fixture
def contents(source, bundle) -> dict[str, bytes]:
    files = {file.sha256: file.path for file in bundle.files}
    return {
        digest: README if path.startswith("docs/") else (source / path).read_bytes() for digest, path in files.items()
    }


@pytest.fixture
def store(tmp_path, contents) -> Path:
    for digest, content in contents.items():
        LocalBlobs(tmp_path / "store").put([content], digest, limit=len(content))
    return tmp_path / "store"


def serve(contents, pieces=3):
    def fetch(digest):
        asked.append(digest)
        content = contents[digest]
        step = max(1, len(content) // pieces)
        yield from (content[start : start + step] for start in range(0, len(content), step))

    asked: list[str] = []
    fetch.asked = asked
    return fetch


def refuse(digest):
    raise AssertionError(f"{digest} was fetched")


def passes(bundle, root) -> bool:
    seen = integrity.observe(bundle, root)
    right = {file.path: file.sha256 for file in bundle.files}
    return not seen["extra"] and {record["path"]: record.get("sha256") for record in seen["files"]} == right


def left_over(data_dir: Path) -> list[str]:
    staged = [path.name for path in (data_dir / "staged").glob(".partial-*")]
    return staged + [path.name for path in (data_dir / "blobs/incoming").iterdir()]


def test_files_in_the_store_are_linked_and_not_copied(tmp_path, bundle, store):
    place = Staging(tmp_path / "data", store).stage(bundle, refuse)
    assert passes(bundle, place.root)
    for file in bundle.files:
        assert (place.root / file.path).samefile(LocalBlobs(store).path(file.sha256))
    assert place.root == tmp_path / "data/staged" / bundle.digest.removeprefix("sha256:")
    assert (place.facts.files, place.facts.size) == (3, sum(file.size for file in bundle.files))
    assert not left_over(tmp_path / "data")


def test_files_are_read_only_in_folders_that_every_engine_may_enter(tmp_path, bundle, contents):
    previous = os.umask(0o077)
    try:
        root = Staging(tmp_path).stage(bundle, serve(contents)).root
    finally:
        os.umask(previous)
    assert {(root / file.path).stat().st_mode & 0o777 for file in bundle.files} == {0o444}
    assert {path.stat().st_mode & 0o777 for path in (root, root / "docs", root / "docs/en")} == {0o755}


def test_what_the_store_lacks_is_fetched_once(tmp_path, bundle, contents, store):
    missing = bundle.files[0].sha256
    LocalBlobs(store).path(missing).unlink()
    fetch = serve(contents)
    assert passes(bundle, Staging(tmp_path / "data", store).stage(bundle, fetch).root)
    assert fetch.asked == [missing]


def test_a_staged_bundle_is_staged_again_without_reading_or_fetching(tmp_path, bundle, contents):
    first = Staging(tmp_path).stage(bundle, serve(contents)).root
    inodes = [(first / file.path).stat().st_ino for file in bundle.files]
    again = Staging(tmp_path).stage(bundle, refuse).root
    assert [(again / file.path).stat().st_ino for file in bundle.files] == inodes


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_not_allowed_files_are_copied(tmp_path, bundle, store, monkeypatch, number):
    def link(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)  # a file system without links, which this machine has not
    root = Staging(tmp_path / "data", store).stage(bundle, refuse).root
    assert passes(bundle, root)
    assert {(root / file.path).stat().st_mode & 0o777 for file in bundle.files} == {0o444}


def test_a_full_disk_is_told_and_not_taken_for_a_lack_of_links(tmp_path, bundle, store, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(staging.DiskFull, match="No space"):
        Staging(tmp_path / "data", store).stage(bundle, refuse)
    assert not left_over(tmp_path / "data")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), DigestMismatch),
        (lambda content: content[:-1], DigestMismatch),
        (lambda content: b"", DigestMismatch),
        (lambda content: content + b"x", TooLarge),
    ],
    ids=["one wrong bit", "one byte short", "nothing", "one byte too many"],
)
def test_fetched_bytes_that_are_not_the_ones_asked_for_are_refused_and_leave_nothing(
    tmp_path, bundle, contents, spoil, problem
):
    wrong = bundle.files[-1].sha256
    with pytest.raises(problem):
        Staging(tmp_path).stage(bundle, serve(contents | {wrong: spoil(contents[wrong])}))
    assert not left_over(tmp_path)
    assert not (tmp_path / "staged" / bundle.digest.removeprefix("sha256:")).exists()
    assert passes(bundle, Staging(tmp_path).stage(bundle, serve(contents)).root)


def test_a_transfer_that_breaks_leaves_nothing_and_goes_on_with_what_it_has(tmp_path, bundle, contents):
    def broken(digest):
        yield contents[digest][:10]
        raise ConnectionResetError

    kept = serve(contents)
    last = bundle.files[-1].sha256
    with pytest.raises(ConnectionResetError):
        Staging(tmp_path).stage(bundle, lambda digest: broken(digest) if digest == last else kept(digest))
    assert not left_over(tmp_path)
    again = serve(contents)
    Staging(tmp_path).stage(bundle, again)
    assert again.asked == [last]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda root: (root / "extra.bin").write_bytes(b"x"),
        lambda root: (root / "folder").mkdir(),
        lambda root: (root / "model.gguf").unlink(),
        lambda root: (root / "link").symlink_to("model.gguf"),
    ],
    ids=["a further file", "a further folder", "a missing file", "a link"],
)
def test_a_staged_folder_that_is_not_the_bundle_is_built_again(tmp_path, bundle, contents, spoil):
    root = Staging(tmp_path).stage(bundle, serve(contents)).root
    spoil(root)
    assert passes(bundle, Staging(tmp_path).stage(bundle, serve(contents)).root)


def test_a_link_in_the_store_is_not_followed(tmp_path, bundle, contents, store):
    blob = LocalBlobs(store).path(bundle.files[-1].sha256)
    blob.rename(blob.with_suffix(".elsewhere"))
    blob.symlink_to(blob.with_suffix(".elsewhere"))
    fetch = serve(contents)
    root = Staging(tmp_path / "data", store).stage(bundle, fetch).root
    assert fetch.asked == [bundle.files[-1].sha256]
    assert passes(bundle, root)


def test_jobs_that_stage_the_same_bundle_at_once_share_one_folder(tmp_path, bundle, contents):
    fetch, gate, places = serve(contents), threading.Barrier(4), []

    def stage():
        gate.wait()
        places.append(Staging(tmp_path).stage(bundle, fetch))

    threads = [threading.Thread(target=stage) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 4
    assert len({place.root for place in places}) == 1
    assert sorted(fetch.asked) == sorted(file.sha256 for file in bundle.files)
    assert passes(bundle, places[0].root)


def test_a_job_that_is_over_stops_fetching_and_stops_waiting(tmp_path, bundle, contents):
    class Over(Exception):
        pass

    lines = []

    def progress(line):
        lines.append(line)
        if len(lines) > 1:  # the first one says that a file begins
            raise Over

    with pytest.raises(Over):
        Staging(tmp_path).stage(bundle, serve(contents), progress)
    assert lines[0].startswith("staged 0 of ")
    assert lines[0].endswith(f" MB: {bundle.files[0].path}")
    assert not left_over(tmp_path)
    lock = tmp_path / "staged" / f"{bundle.digest.removeprefix('sha256:')}.lock"
    with staging._locked(lock, lambda _: None), pytest.raises(Over):
        Staging(tmp_path).stage(bundle, refuse, progress)


def test_what_a_killed_process_left_is_removed_at_the_start(tmp_path, bundle, contents):
    first = Staging(tmp_path)
    root = first.stage(bundle, serve(contents)).root
    (tmp_path / "staged/.partial-abc-1").mkdir()
    (tmp_path / "staged/.partial-abc-1/half").write_bytes(b"x")
    (tmp_path / "blobs/incoming/tmpx").write_bytes(b"x")
    Staging(tmp_path).tidy()
    assert not left_over(tmp_path)
    assert passes(bundle, root)


def test_a_discarded_bundle_is_fetched_again(tmp_path, bundle, contents):
    staged = Staging(tmp_path)
    root = staged.stage(bundle, serve(contents)).root
    model = root / "model.gguf"
    model.chmod(0o644)
    model.write_bytes(b"x" * model.stat().st_size)
    assert not passes(bundle, staged.stage(bundle, refuse).root)
    staged.discard(bundle)
    assert not root.exists()
    fetch = serve(contents)
    assert passes(bundle, staged.stage(bundle, fetch).root)
    assert len(fetch.asked) == len(bundle.files)


# ------------------------------------------------------------------------------------------------- making room


def named(source, name: str) -> tuple[Bundle, dict[str, bytes]]:
    """A bundle like the other ones, with one file of its own. Returns it with the contents of its files."""
    own = name.encode() * 1000
    plain = chain.describe(source, environment=ENVIRONMENT)
    entry = {"path": "NOTES.md", "size": len(own), "sha256": "sha256:" + hashlib.sha256(own).hexdigest()}
    files = [*(file.model_dump() for file in plain.files), entry | {"role": Role.DOCUMENTATION}]
    made = chain.describe(source, environment=ENVIRONMENT, files=sorted(files, key=lambda file: file["path"]))
    contents = {file.sha256: (source / file.path).read_bytes() for file in plain.files}
    return made, contents | {entry["sha256"]: own}


def stage(places: Staging, source, name: str, job: str | None = None) -> Bundle:
    made, contents = named(source, name)
    places.stage(made, serve(contents))
    os.utime(places.root(made), (len(name), len(name)))  # the longer its name, the later it was used
    if job is not None:
        places.hold(made.digest, job)
    return made


def test_above_the_limit_what_no_job_holds_goes_and_shared_files_stay(tmp_path, source):
    size = sum(len(content) for content in named(source, "a")[1].values())
    places = Staging(tmp_path, kept_bytes=size + 3500)
    old, newer = stage(places, source, "a", "job-1"), stage(places, source, "bb", "job-2")
    used = places.used_bytes()
    assert used == size + 2000
    newest = stage(places, source, "ccc", "job-3")
    places.release("job-2")
    # `a` is older and held. What they share stays, and the room of one's own file is enough.
    assert [places.root(one).is_dir() for one in (old, newer, newest)] == [True, False, True]
    assert places.used_bytes() == size + 3000
    assert passes(old, places.root(old))
    places.release("job-1")
    assert places.root(old).is_dir()


def test_what_was_in_use_until_now_goes_after_what_was_staged_since(tmp_path, source):
    size = sum(len(content) for content in named(source, "a")[1].values())
    places = Staging(tmp_path, kept_bytes=size + 1500)
    served, tried = stage(places, source, "a", "month-long"), stage(places, source, "bb")
    places.release("month-long")
    assert [places.root(one).is_dir() for one in (served, tried)] == [True, False]


def test_what_others_remove_meanwhile_is_passed_by(tmp_path, source):
    places, size = Staging(tmp_path), sum(len(content) for content in named(source, "a")[1].values())
    kept, gone = stage(places, source, "a"), stage(places, source, "bb")
    seen = places._cached()
    staging.shutil.rmtree(places.root(gone))
    assert [path for path, _ in staging._facts([places.root(gone), places.root(kept)])] == [places.root(kept)]
    assert len(seen) == 4
    assert places.used_bytes() == size + 2000  # its own file is in the cache still
    assert list(staging._inodes(places.root(gone))) == []


def test_jobs_at_once_share_what_was_fetched_where_nothing_can_be_linked(tmp_path, bundle, contents, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    places, copy, gone = Staging(tmp_path), staging.shutil.copyfile, []

    def copyfile(cached, target):
        copy(cached, target)
        cached.unlink()  # the other job has copied it too, and was first
        gone.append(target.name)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(staging.shutil, "copyfile", copyfile)
    fetch = serve(contents)
    assert passes(bundle, places.stage(bundle, fetch).root)
    assert len(gone) == len(fetch.asked) == len(bundle.files)


def test_a_full_disk_lets_go_of_what_is_unused_and_stages_then(tmp_path, source):
    places = Staging(tmp_path)
    held, unused = stage(places, source, "a", "job-1"), stage(places, source, "bb")
    made, contents = named(source, "ccc")
    full = iter([OSError(errno.ENOSPC, "No space left on device")])

    def fetch(digest):
        if (error := next(full, None)) is not None:
            raise error
        yield contents[digest]

    place = places.stage(made, fetch)
    assert passes(made, place.root)
    assert [places.root(one).is_dir() for one in (held, unused)] == [True, False]


def test_a_disk_that_stays_full_is_told_with_what_is_missing_and_nothing_fetched_stays(tmp_path, source):
    places = Staging(tmp_path)
    held = stage(places, source, "a", "job-1")
    used = places.used_bytes()
    made, _ = named(source, "bb")

    def fetch(_):
        yield from ()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(staging.DiskFull, match=r"^No space left on device: the bundle's files are 0\.002") as told:
        places.stage(made, fetch)
    assert told.value.members == {"cause": "disk_full"}
    assert str(tmp_path) in told.value.detail
    assert places.used_bytes() == used
    assert places.root(held).is_dir()
    assert left_over(tmp_path) == []
