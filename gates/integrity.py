"""The integrity gate: the bytes that the engine reads are the bytes that the bundle names.

Every file is hashed where the engine reads it, once before boot and once after the last gate; between the two
no file may have been touched. A pass holds for the whole tree: a missing file, a further file, a link or a
device fails as a wrong byte does.
"""

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from gates.gate import MAX_FINDINGS, Gate, GateContext, Judged, JudgeInput, Records, clip, errored, finding
from schemas.bundle import COMPONENTS, MAX_FILES, Bundle, File
from schemas.result import Finding, Measurement, Verdict

CHUNK_BYTES = 1024 * 1024
THREADS = 4
MAX_ENTRIES = 2 * MAX_FILES
PROGRESS_SECONDS = 0.5
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Problems of one file, in its record. Those in _FACTS say that the tree is wrong; the others that it could not
# be read as one state, which says nothing about the candidate.
MISSING, IRREGULAR, UNREADABLE, CHANGED = "missing", "not-a-regular-file", "unreadable", "changed-while-read"
DIFFERS = "file-differs"
"""Code of a finding about a file with other bytes; `expected` is the digest of its blob."""
_FACTS = frozenset({MISSING, IRREGULAR})


def observe(bundle: Bundle, root: Path, progress: Callable[[str], None] = lambda _: None) -> Records:
    """Hash every file of the bundle under `root` and list what else lies there.

    Nothing is followed: neither a link at the end of a path nor one in the middle. Files are read in full, several
    at once on threads. `progress` is called from the calling thread only.

    Returns:
        One pass: `files` (one record a file of the bundle, by path), `extra` (entries that the bundle does not
        name), `entries` (number of both), `problem` (why the tree could not be listed, else null), `seconds`.
    """
    started = time.perf_counter()
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return {"files": [], "extra": [], "entries": 0, "problem": _reason(error), "seconds": 0.0}
    try:
        problem, extra = _list_extra(top, {file.path for file in bundle.files})
        files = _hash_all(bundle.files, top, progress)
    finally:
        os.close(top)
    return {
        "files": files,
        "extra": extra,
        "entries": len(files) + len(extra),
        "problem": problem,
        "seconds": round(time.perf_counter() - started, 6),
    }


def _reason(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"


def _list_extra(top: int, known: set[str]) -> tuple[str | None, list[str]]:
    folders = {"/".join(parts[:depth]) for path in known for parts in [path.split("/")] for depth in range(len(parts))}
    extra: list[str] = []
    try:
        for path, is_folder in _walk(top, ""):
            if path not in (folders if is_folder else known):
                extra.append(clip(path + "/" if is_folder else path, 1024))
            if len(extra) > MAX_ENTRIES:
                return f"more than {MAX_ENTRIES} entries that the bundle does not name", sorted(extra)
    except OSError as error:
        return _reason(error), sorted(extra)
    return None, sorted(extra)


def _walk(folder: int, prefix: str) -> Iterator[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in found:
        path = prefix + name
        yield path, is_folder
        if is_folder:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _walk(inner, path + "/")
            finally:
                os.close(inner)


def _hash_all(files: list[File], top: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    total = sum(file.size for file in files)
    done = 0
    lock = threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size

    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="hash") as pool:
        # Largest first, so that no thread is left alone with the last big shard.
        futures = {
            file.path: pool.submit(_hash, file.path, top, count) for file in sorted(files, key=lambda file: -file.size)
        }
        pending = set(futures.values())
        while pending:
            _, pending = wait(pending, timeout=PROGRESS_SECONDS)
            progress(f"hashed {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {len(files) - len(pending)} files done")
    return [futures[file.path].result() for file in files]


def _hash(path: str, top: int, count: Callable[[int], None]) -> dict[str, Any]:
    try:
        descriptor = _open(path, top)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return {"path": path, "problem": MISSING}
        if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}:
            return {"path": path, "problem": IRREGULAR, "detail": _reason(error)}
        return {"path": path, "problem": UNREADABLE, "detail": _reason(error)}
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            return {"path": path, "problem": IRREGULAR, "detail": stat.filemode(before.st_mode)}
        digest = hashlib.sha256()
        while chunk := os.read(descriptor, CHUNK_BYTES):
            digest.update(chunk)
            count(len(chunk))
        after = os.fstat(descriptor)
    except OSError as error:
        return {"path": path, "problem": UNREADABLE, "detail": _reason(error)}
    finally:
        os.close(descriptor)
    record = {"path": path, "problem": None, "size": after.st_size, "sha256": "sha256:" + digest.hexdigest()}
    record |= {"inode": str(after.st_ino), "mtime_ns": str(after.st_mtime_ns)}
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        record["problem"] = CHANGED
    return record


def _open(path: str, top: int) -> int:
    *folders, name = path.split("/")
    current = os.dup(top)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=current)
            os.close(current)
            current = inner
        return os.open(name, _FILE, dir_fd=current)
    finally:
        os.close(current)


def measure(context: GateContext) -> Records:
    """Hash the tree now; with the pass from before boot, where the worker has taken one."""
    passes = [] if context.before_boot is None else [context.before_boot]
    return {"passes": [*passes, observe(context.bundle, context.root, context.progress)]}


def touched(before: Records, root: Path) -> list[str]:
    """Return the paths of a pass whose files are not the ones that it hashed any more, as far as that is seen unread.

    A file that is gone, replaced, of another size or written to since is one; what is written and has its time set
    back is found by the next pass alone.
    """
    found = []
    for record in before["files"]:
        try:
            facts = (root / record["path"]).lstat()
        except OSError:
            found.append(record["path"])
            continue
        now = {"inode": str(facts.st_ino), "size": facts.st_size, "mtime_ns": str(facts.st_mtime_ns)}
        if any(record.get(name) != value for name, value in now.items()):
            found.append(record["path"])
    return found


def judge(given: JudgeInput) -> Judged:
    """Judge one or two passes.

    A wrong tree fails at any time. One clean pass alone is inconclusive, since the engine has read the files
    after it; two clean passes, with no file touched between them, pass.
    """
    passes = given.records["passes"]
    if not 1 <= len(passes) <= 2:
        return errored(f"There are {len(passes)} passes over the files instead of two; run the gate again.")
    facts: list[Finding] = []
    doubts: list[Finding] = []
    for place, one in zip(("before boot", "after the last gate"), passes, strict=False):
        _examine(given.bundle, one, place, facts, doubts)
    measurements = _measurements(given.bundle, passes)
    if facts:
        more = f", and {len(facts) - 1} more" if len(facts) > 1 else ""
        summary = clip(f"{facts[0].message.removesuffix('.')}{more}.")
        return Judged(Verdict.FAILED, summary, measurements, (facts + doubts)[:MAX_FINDINGS])
    if len(passes) == 2 and not doubts:
        doubts += _touched(*passes)
    if doubts:
        return errored(doubts[0].message, doubts[:MAX_FINDINGS], measurements)
    if len(passes) == 1:
        summary = "All files were right before boot; they have not been hashed again after the last gate."
        return Judged(Verdict.INCONCLUSIVE, summary, measurements)
    size = sum(file.size for file in given.bundle.files)
    count = len(given.bundle.files)
    is_one = count == 1 and not given.manner.says_all
    what = f"The one file ({size:,} bytes) was" if is_one else f"All {count} files ({size:,} bytes) were"
    summary = f"{what} right before boot and after the last gate."
    return Judged(Verdict.PASSED, summary, measurements)


def _examine(bundle: Bundle, one: Records, place: str, facts: list[Finding], doubts: list[Finding]) -> None:
    if one["problem"] is not None:
        message = f"The files could not be listed {place}: {one['problem']}."
        advice = "Check that the staged folder exists and that the runner may read it."
        doubts.append(finding("tree-unreadable", message, advice=advice))
    for path in one["extra"]:
        message = f"{path} lies among the files {place}, and the bundle does not name it."
        facts.append(finding("file-extra", message, file=path, advice="Stage the bundle into an empty folder."))
    found = {record["path"]: record for record in one["files"]}
    is_whole = one["entries"] == len(one["files"]) + len(one["extra"]) and len(found) == len(one["files"])
    if not is_whole or found.keys() != {file.path for file in bundle.files}:
        doubts.append(finding("records-incomplete", f"Not every file was looked at {place}; run the gate again."))
    for file in bundle.files:
        if file.path in found:
            _examine_file(file, found[file.path], place, facts, doubts)


def _examine_file(file: File, record: Records, place: str, facts: list[Finding], doubts: list[Finding]) -> None:
    if (problem := record["problem"]) is not None:
        message = f"{file.path} is {problem.replace('-', ' ')} {place}."
        advice = "Stage the bundle again; if it repeats, look at the runner's disk and at who writes there."
        one = finding(
            f"file-{problem}",
            message,
            file=file.path,
            found=record.get("detail"),
            expected=file.sha256,
            advice=advice,
        )
        (facts if problem in _FACTS else doubts).append(one)
        return
    size, digest = record["size"], record["sha256"]
    if (size, digest) != (file.size, file.sha256):
        message = f"{file.path} has {size} bytes with {digest} {place}; the bundle says {file.size} with {file.sha256}."
        advice = "Stage the bundle again from the registry; if it repeats, the copy in the store is damaged."
        facts.append(finding(DIFFERS, message, file=file.path, found=digest, expected=file.sha256, advice=advice))


def _touched(before: Records, after: Records) -> Iterator[Finding]:
    earlier = {record["path"]: record for record in before["files"]}
    for record in after["files"]:
        then, now = (
            {key: one[key] for key in ("inode", "size", "mtime_ns")} for one in (earlier[record["path"]], record)
        )
        if then != now:
            message = f"{record['path']} was replaced or touched while the gates ran."
            advice = "Let nothing write to staged files while an engine runs on them, and run the gates again."
            yield finding("file-touched", message, file=record["path"], found=now, expected=then, advice=advice)


def _measurements(bundle: Bundle, passes: list[Records]) -> list[Measurement]:
    records = [record for one in passes for record in one["files"]]
    hashed = [record for record in records if record["problem"] is None]
    right = {file.path: file.sha256 for file in bundle.files}
    matching = sum(1 for record in hashed if right.get(record["path"]) == record["sha256"])
    size = sum(record["size"] for record in hashed)
    seconds = round(sum(one["seconds"] for one in passes), 6)
    return [
        Measurement(name="files_matching", unit="count", statistic="value", value=matching, n=len(records), k=matching),
        Measurement(name="bytes_hashed", unit="bytes", statistic="value", value=size, n=len(hashed)),
        Measurement(name="hashing", unit="seconds", statistic="value", value=seconds, n=len(passes)),
    ]


GATE = Gate(
    name="integrity",
    version=1,
    depends_on=tuple(COMPONENTS),
    measure=measure,
    judge=judge,
)
