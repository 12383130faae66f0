"""No room left: for blobs, for a runner's staging, and for everything of a stack at once."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from registry.client import Client
from registry.storage.local import LocalBlobs
from schemas.api import TargetCreate
from schemas.common import sha256_digest
from schemas.problems import Problem
from tests.support.api import Api
from tests.support.disk import small_disk
from tests.support.embedded import Stack, until
from tests.support.runners import bench

ROOT = Path(__file__).parents[2]
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
