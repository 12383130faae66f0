"""A fetch that is cut, killed or doubled goes on where it was, and ends with the listed bytes or none."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gates.sources.fetch import Bounds
from gates.sources.source import SourceRefused, SourceUnavailable
from gates.sources.store import ABANDONED_SECONDS
from tests.gates.sources.conftest import WEIGHTS
from tests.support.hub import answer, ranged

HALF = len(WEIGHTS) // 2
ONLY = {"model.safetensors"}


def cut(request):
    whole = answer(200, WEIGHTS, {"etag": '"one"'})
    return whole[: len(whole) - len(WEIGHTS) + HALF]


def once(lie):
    """Lie to the first request only."""
    left = [lie]
    return lambda request: left.pop()(request) if left else None


def ranges(hub):
    return [(r.headers.get("range"), r.headers.get("if-range")) for r in hub.asked if r.server == "cdn"]


def test_a_file_that_is_cut_is_gone_on_from_where_it_was(fetching):
    honest = '"one"'
    fetching.hub.lies["cdn"] = lambda request: (
        cut(request) if "range" not in request.headers else ranged(request, WEIGHTS, honest)
    )
    moved = []
    _, found = fetching.run(keep=ONLY, progress=lambda count, total: moved.append((count, total)))
    assert ranges(fetching.hub) == [(None, None), (f"bytes={HALF}-", honest)]
    assert found["model.safetensors"].place.read_bytes() == WEIGHTS
    assert found["model.safetensors"].received == len(WEIGHTS) - HALF
    assert {total for _, total in moved} == {len(WEIGHTS)}
    assert fetching.files() == [found["model.safetensors"].place.relative_to(fetching.root).as_posix()]


def test_a_part_stays_when_all_tries_fail_and_a_later_call_goes_on_from_it(fetching):
    fetching.hub.lies["cdn"] = lambda request: cut(request) if "range" not in request.headers else b""
    with pytest.raises(SourceUnavailable) as problem:
        fetching.run(keep=ONLY)
    assert (problem.value.code, problem.value.file) == ("connection-broken", "model.safetensors")
    assert [path.split("/")[0] for path in fetching.files()] == ["parts", "parts"]
    fetching.hub.asked.clear()
    fetching.hub.lies["cdn"] = lambda request: ranged(request, WEIGHTS, '"one"')
    _, found = fetching.run(keep=ONLY)
    assert ranges(fetching.hub) == [(f"bytes={HALF}-", '"one"')]
    assert found["model.safetensors"].received == len(WEIGHTS) - HALF


def test_what_nobody_has_gone_on_with_for_two_weeks_goes(fetching):
    fetching.hub.lies["cdn"] = lambda request: cut(request) if "range" not in request.headers else b""
    with pytest.raises(SourceUnavailable):
        fetching.run(keep=ONLY)
    parts = fetching.files()
    (fetching.root / "names").mkdir(exist_ok=True)
    left = fetching.root / "names" / f".{'0' * 64}.1.2"
    left.write_bytes(b"")
    fetching.run(keep={"config.json"})
    assert set(parts) < set(fetching.files())
    for path in (left, *(fetching.root / part for part in parts)):
        os.utime(path, (1, time.time() - ABANDONED_SECONDS - 60))
    part = min((fetching.root / part for part in parts), key=lambda path: len(path.name))
    with part.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fetching.run(keep={"config.json"})
        assert (part.exists(), left.exists()) == (True, False)
    fetching.run(keep={"config.json"})
    assert [path for path in fetching.files() if not path.startswith(("sha256/", "names/"))] == []


def test_a_server_that_brings_a_byte_a_try_is_given_up(fetching):
    def byte(request):
        whole = ranged(request, WEIGHTS, '"one"')
        return whole[: whole.index(b"\r\n\r\n") + 5]

    fetching.hub.lies["cdn"] = byte
    with pytest.raises(SourceUnavailable) as problem:
        fetching.run(keep=ONLY)
    assert problem.value.code == "connection-broken"
    assert [asked for asked, _ in ranges(fetching.hub)] == [None, "bytes=1-", "bytes=2-"]


@pytest.mark.parametrize(
    "then",
    [
        lambda request: ranged(request, WEIGHTS, '"two"'),
        lambda request: answer(200, WEIGHTS),
        lambda request: answer(416) if "range" in request.headers else None,
        # These say that they go on, with bytes of another file or another place.
        lambda request: (
            answer(
                206,
                WEIGHTS[HALF:],
                {"etag": '"two"', "content-range": f"bytes {HALF}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"},
            )
            if "range" in request.headers
            else None
        ),
        lambda request: (
            answer(206, WEIGHTS[5:], {"etag": '"one"', "content-range": f"bytes 5-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"})
            if "range" in request.headers
            else None
        ),
        lambda request: (
            answer(
                206,
                os.urandom(len(WEIGHTS) - HALF),
                {"etag": '"one"', "content-range": f"bytes {HALF}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"},
            )
            if "range" in request.headers
            else None
        ),
    ],
    ids=["changed", "range ignored", "range refused", "other tag", "other place", "other bytes"],
)
def test_a_part_that_cannot_be_gone_on_from_is_begun_anew(fetching, then):
    first = [cut]
    fetching.hub.lies["cdn"] = lambda request: first.pop()(request) if first else then(request)
    _, found = fetching.run(keep=ONLY)
    assert found["model.safetensors"].place.read_bytes() == WEIGHTS
    assert found["model.safetensors"].received == len(WEIGHTS)
    assert len(fetching.files()) == 1


def test_a_part_that_was_altered_on_the_disk_does_not_become_a_file(fetching):
    fetching.hub.lies["cdn"] = lambda request: cut(request) if "range" not in request.headers else b""
    with pytest.raises(SourceUnavailable):
        fetching.run(keep=ONLY)
    (part,) = [path for path in (fetching.root / "parts").iterdir() if path.suffix != ".tag"]
    raw = bytearray(part.read_bytes())
    raw[7] ^= 1
    part.write_bytes(raw)
    fetching.hub.lies["cdn"] = lambda request: ranged(request, WEIGHTS, '"one"')
    _, found = fetching.run(keep=ONLY)
    assert found["model.safetensors"].place.read_bytes() == WEIGHTS


def test_what_is_there_is_not_asked_for_again(fetching):
    fetching.run()
    fetching.hub.asked.clear()
    _, found = fetching.run()
    assert {one.received for one in found.values()} == {0}
    assert [request.path.split("/")[1] for request in fetching.hub.asked] == ["api", "api"]


def test_a_file_of_the_store_that_was_written_since_is_fetched_again(fetching):
    _, found = fetching.run()
    place = found["model.safetensors"].place
    place.chmod(0o600)
    place.write_bytes(bytes(len(WEIGHTS)))
    _, found = fetching.run()
    assert found["model.safetensors"].received == len(WEIGHTS)
    assert place.read_bytes() == WEIGHTS
    # One that was only touched is not, nor one that got a further name.
    os.utime(place)
    place.with_name("further").hardlink_to(place)
    _, found = fetching.run()
    assert found["model.safetensors"].received == 0


def test_a_file_that_git_names_is_held_against_that_name_also_when_it_is_there(fetching):
    _, found = fetching.run()
    good = found["config.json"]
    body = b'{"model_type": "evil!"}'
    assert len(body) == good.size
    evil = f"sha256:{hashlib.sha256(body).hexdigest()}"
    place = fetching.store.place(evil)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(body)
    (name,) = (fetching.root / "names").iterdir()
    name.write_text(evil)
    _, found = fetching.run()
    assert (found["config.json"].sha256, found["config.json"].received) == (good.sha256, good.size)


def test_a_store_in_which_others_may_write_is_refused(fetching):
    fetching.root.mkdir()
    for mode in (0o777, 0o770, 0o702):
        fetching.root.chmod(mode)
        with pytest.raises(SourceRefused) as refused:
            fetching.run()
        assert refused.value.code == "store-foreign"
    assert fetching.files() == []
    fetching.root.chmod(0o755)
    fetching.run()


def test_a_server_that_says_it_is_busy_is_asked_again(fetching):
    fetching.hub.lies["resolve"] = once(lambda request: answer(503, headers={"retry-after": 0}))
    fetching.hub.lies["cdn"] = once(lambda request: answer(429))
    _, found = fetching.run()
    assert found["model.safetensors"].place.read_bytes() == WEIGHTS


def test_two_that_fetch_one_file_fetch_it_once(fetching):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        whole = answer(200, WEIGHTS)
        yield whole[:1000]
        go_on.wait(30)
        yield whole[1000:]

    fetching.hub.lies["cdn"] = slow
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetching.run(keep=ONLY))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    # Both have listed the repository before the file may end.
    while sum("/tree/" in request.path for request in fetching.hub.asked) < 2:
        fetching.hub.waited(0.01)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(ranges(fetching.hub)) == 1
    assert sorted(found["model.safetensors"].received for _, found in results) == [0, len(WEIGHTS)]


KILLED = """
import sys
from pathlib import Path
from gates.sources.fetch import Bounds, fetch
from gates.sources.hosts import Hosts
from gates.sources.hub import HubSource
from gates.sources.store import FetchStore
from gates.sources.web import Web

hub, cdn, root = sys.argv[1:]
web = Web(Hosts(named=[hub, cdn]))
source = HubSource("hf:org/base", web, hub)
resolved = source.resolve()
fetch(source, resolved, source.list(resolved), FetchStore(Path(root)))
"""


def test_a_process_that_is_killed_leaves_only_a_part_that_is_gone_on_from(fetching):
    hub, reached = fetching.hub, threading.Event()

    def half(request):
        if "range" in request.headers:
            yield ranged(request, WEIGHTS, '"one"')
            return
        whole = answer(200, WEIGHTS, {"etag": '"one"'})
        yield whole[: len(whole) - len(WEIGHTS) + HALF]
        reached.set()
        hub.waited(60)

    hub.lies["cdn"] = half
    command = [sys.executable, "-c", KILLED, hub.url(), hub.url("cdn"), str(fetching.root)]
    with subprocess.Popen(command) as process:
        assert reached.wait(60)
        key = hub.repositories["org/base"].tree()[1]["lfs"]["oid"]
        part = fetching.root / "parts" / key
        while not part.is_file() or part.stat().st_size < HALF // 2:
            hub.waited(0.01)
        process.send_signal(signal.SIGKILL)
    there = part.stat().st_size
    assert not (fetching.root / "sha256" / key[:2]).exists()
    hub.asked.clear()
    _, found = fetching.run()
    assert ranges(hub) == [(f"bytes={there}-", '"one"')]
    assert found["model.safetensors"].received == len(WEIGHTS) - there
    assert not any("parts" in path for path in fetching.files())


def test_files_arrive_at_the_same_time_but_no_more_than_are_allowed(fetching):
    repository = fetching.hub.repositories["org/base"]
    repository.files = {f"f{number}.json": b"{}" + b" " * number for number in range(12)}
    repository.lfs = set()
    lock, now, most = threading.Lock(), [0], [0]
    full = threading.Event()

    def counted(request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                full.set()
        full.wait(30)
        with lock:
            now[0] -= 1

    fetching.hub.lies["resolve"] = counted
    _, found = fetching.run(bounds=Bounds(at_once=3))
    assert (most[0], len(found)) == (3, 12)


def test_one_bad_file_stops_the_others_and_is_named(fetching):
    repository = fetching.hub.repositories["org/base"]
    repository.files["bad.json"] = b"{}"
    hub = fetching.hub
    met = threading.Event()

    def resolve(request):
        if "bad.json" in request.path:
            met.wait(30)
            return answer(200, b"[]")
        return None

    def endless(request):
        whole = answer(200, WEIGHTS)
        yield whole[:1000]
        met.set()
        while True:
            hub.waited(0.02)
            yield b""
            if any("bad.json" in request.path for request in hub.asked):
                yield whole[1000:]
                return

    hub.lies |= {"resolve": resolve, "cdn": endless}
    with pytest.raises(Exception, match="other bytes") as refused:
        fetching.run(keep={"bad.json", "model.safetensors"})
    assert refused.value.file == "bad.json"


def test_a_store_that_cannot_hold_a_file_says_so_before_it_is_fetched(fetching, tmp_path):
    repository = fetching.hub.repositories["org/base"]
    tree = repository.tree()
    tree[1]["size"] = tree[1]["lfs"]["size"] = 1 << 60
    fetching.hub.lies["tree"] = lambda request: answer(200, json.dumps(tree).encode())
    with pytest.raises(SourceRefused) as refused:
        fetching.run()
    assert refused.value.code == "disk-full"
    fetching.store.root = tmp_path / "a file" / "inside"
    (tmp_path / "a file").write_bytes(b"")
    fetching.hub.lies.clear()
    with pytest.raises(SourceRefused) as refused:
        fetching.run()
    assert refused.value.code == "store-unwritable"
    assert not any("/resolve/" in request.path for request in fetching.hub.asked)
