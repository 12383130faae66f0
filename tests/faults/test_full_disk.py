"""No room left: for blobs, for a runner's staging, and for everything of a stack at once."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from registry.client import Client
from registry.storage.local import LocalBlobs
from schemas.api import TargetCreate
from schemas.common import sha256_digest
from schemas.problems import Problem
from tests.support.api import Api
from tests.support.disk import Disk, small_disk
from tests.support.embedded import Stack, until
from tests.support.gateway import TARGET, RunningGateway, arm, ask_many, running_gateway, shares, split
from tests.support.runners import bench
from tests.support.streams import stream_engine
from workers.traffic.guard import DeadManSwitch

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 11, 3, 14, 3, tzinfo=UTC)
LARGE = bytes(range(256)) * 8192


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "incoming").iterdir()]


def test_a_blob_that_finds_no_room_is_refused_leaves_nothing_and_can_be_sent_again(committed, tmp_path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        blobs = LocalBlobs(disk.path)
        with Api(replace(committed, blobs=blobs)) as api:
            client = api.clients["engineer"]
            digest = sha256_digest(LARGE)
            refused = client.put(f"/v1/blobs/{digest}", content=LARGE)
            assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (503, "unavailable")
            assert "no room" in refused.json()["detail"]
            assert left_in(disk.path) == []
            assert client.head(f"/v1/blobs/{digest}").status_code == 404
            disk.resize("8m")
            assert client.put(f"/v1/blobs/{digest}", content=LARGE).status_code == 201
            assert client.get(f"/v1/blobs/{digest}").content == LARGE


def test_a_file_that_may_not_grow_is_no_blob(tmp_path) -> None:
    """The same for any account: the kernel refuses to let a file grow."""
    code = (
        "import resource, sys, pathlib; from registry.storage.local import LocalBlobs; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); store = LocalBlobs(pathlib.Path(sys.argv[1])); "
        "from schemas.common import sha256_digest\n"
        "try:\n    store.put([bytes(8192)], sha256_digest(bytes(8192)), limit=2**20)\n"
        "except OSError as error:\n    print(error.errno)\n"
        "print(store.put([b'small'], sha256_digest(b'small'), limit=2**20))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["27", "5"]
    assert left_in(tmp_path) == []


def test_a_runner_without_room_says_so_blames_no_candidate_and_works_once_there_is(service, tmp_path) -> None:
    with (
        bench(service, tmp_path) as made,
        small_disk(made.settings().data_dir, "600k") as disk,
    ):
        run = made.evaluate(made.bundle(), made.policy())
        agent = made.start(store=False)
        for _ in range(3):
            attempt = made.row(run).attempt
            until(lambda attempt=attempt: made.row(run).attempt > attempt or made.row(run).state == "done", seconds=30)
            until(lambda: made.row(run).state != "claimed", seconds=30)
            made.due(run)
            agent.ring()
        done = made.done(run)
        assert (done.outcome, done.results) == ("undecided", [])
        assert "No space left on device" in str(done.problem)
        assert list((disk.path / "staged").glob(".partial-*")) == []
        disk.resize("64m")
        assert made.done(made.evaluate(made.bundle(), made.policy())).outcome == "passed"
        made.stop(agent)


@pytest.mark.timeout(240)
def test_a_stack_on_a_full_disk_loses_nothing_that_it_answered_and_goes_on_when_there_is_room(tmp_path) -> None:
    with small_disk(tmp_path / "d", "400m") as disk:
        stack = Stack(disk.path / "data", "--no-runner", "--drain-seconds", "1")
        try:
            facts = stack.wait_ready()
            made = 0

            def make(client: Client) -> bool:
                nonlocal made
                body = TargetCreate(name=f"t{made}@prod", runner_class="cpu", gateway="local")
                try:
                    client.targets.create(body, key=f"key-{made}")
                except Problem as problem:
                    if problem.status < 500:
                        raise
                    return False
                made += 1
                return True

            with Client(facts["url"], facts["token"], timeout_seconds=5) as client:
                assert make(client)
                disk.fill()
                # It is refused sooner or later: until then there is room in what the database has taken already.
                ends = time.monotonic() + 40
                while make(client) and time.monotonic() < ends:
                    pass
                assert stack.process.poll() is None
                disk.make_room()
                until(lambda: make(client), seconds=60)
                names = {target.name for target in client.targets.list()}
                assert names == {f"t{number}@prod" for number in range(made)}
                assert client.evidence.verify().verified
            assert json.loads((disk.path / "data" / "config.json").read_bytes())["url"] == facts["url"]
        finally:
            assert stack.stop() == 0


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Iterator[tuple[RunningGateway, Disk]]:
    """A gateway in the middle of a canary, on a disk that has no room left."""
    with (
        small_disk(tmp_path / "g", "4m") as disk,
        stream_engine("stable") as stable,
        stream_engine("candidate") as candidate,
        running_gateway(disk.path / "gateway") as running,
    ):
        back = (arm("stable", stable.address, 10_000), arm("candidate", candidate.address, 0, bundle="b"))
        running.gateway.prepare_rollback(TARGET, back, silence_seconds=30)
        running.gateway.apply(split(1, *shares(stable, candidate, 10_000)))
        running.gateway.beat(TARGET)
        disk.fill()
        put_in_force = running.gateway.put_in_force

        def put(which: str) -> None:
            put_in_force(which)
            disk.fill()  # others take the room that this left

        monkeypatch.setattr(running.gateway, "put_in_force", put)
        assert ask_many(running.url(), 10).engines == {"candidate": 10}
        yield running, disk


def test_on_a_full_disk_traffic_of_a_lost_controller_goes_back_and_the_notice_follows(canary) -> None:
    running, disk = canary
    switch = DeadManSwitch(running.gateway, monotonic=0)
    fired = switch.check(monotonic=30, now=NOW)
    assert ask_many(running.url(), 10).engines == {"stable": 10}
    assert fired is not None
    assert (fired["reason"], fired["targets"]) == ("controller_lost", [TARGET])
    assert running.gateway.take_notice() is None
    switch.check(monotonic=31, now=NOW)
    disk.make_room()
    switch.check(monotonic=32, now=NOW)
    told = running.gateway.take_notice()
    assert told is not None
    assert (told["at"], told["silent_seconds"], told["targets"]) == (fired["at"], 30.0, [TARGET])
    running.gateway.clear_notice()
    assert switch.check(monotonic=33, now=NOW) is None
    assert running.gateway.take_notice() is None


def test_what_a_full_disk_keeps_from_being_written_down_moves_no_other_target(canary) -> None:
    """The switch has taken both back; what was prepared for one alone has the other where it was."""
    running, disk = canary
    other, gateway = "other@prod", running.gateway
    disk.make_room()
    with stream_engine("first") as first, stream_engine("second") as second:
        gateway.prepare_rollback(other, (arm("stable", first.address, 10_000, target=other),), silence_seconds=30)
        gateway.apply(split(1, arm("stable", second.address, 10_000, target=other), target=other))
        disk.fill()
        DeadManSwitch(gateway, monotonic=0).check(monotonic=30, now=NOW)
        for target in (TARGET, other):
            gateway.restore(target)
            assert ask_many(running.url(), 10).engines == {"stable": 10}
            assert ask_many(running.url(other), 10).engines == {"first": 10}


def test_a_notice_that_found_no_room_is_dropped_once_a_controller_has_taken_over(canary) -> None:
    running, disk = canary
    switch = DeadManSwitch(running.gateway, monotonic=0)
    switch.check(monotonic=30, now=NOW)
    assert running.gateway.is_restored(TARGET)
    disk.make_room()
    # It found the way back in force, and recorded that; what it does next is no business of the notice.
    running.gateway.restore(TARGET)
    running.gateway.beat(TARGET)
    assert switch.check(monotonic=31, now=NOW) is None
    assert running.gateway.take_notice() is None


def test_on_a_full_disk_a_controller_takes_traffic_back_and_says_so(canary) -> None:
    running, disk = canary
    gateway = running.gateway
    applied = gateway.restore(TARGET)
    assert ask_many(running.url(), 10).engines == {"stable": 10}
    assert gateway.restore(TARGET).split == applied.split
    assert gateway.is_restored(TARGET)
    disk.make_room()
    assert gateway.restore(TARGET).split == applied.split
    assert not gateway.is_prepared(TARGET)
    gateway.apply(replace(applied.split, revision=applied.split.revision + 1))
    assert ask_many(running.url(), 10).engines == {"stable": 10}
