"""Uploads in pieces: they go on where they were cut, whatever cut them, and leave nothing behind."""

import json
import os
import random
import signal
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import httpx
import pytest
from sqlalchemy import func, select, update

from gates.plain import NO_AUTHORITY
from registry import housekeeping, uploads
from registry.client import Client
from registry.client.uploads import Uploader
from registry.service import Service
from registry.tables import Base, ProjectUsageRow, UploadRow
from schemas.common import sha256_digest
from schemas.problems import DigestMismatch, Unavailable
from tests.registry.test_api_process import environment, free_port, start
from tests.support.api import Api, make_tokens
from tests.support.factories import WEIGHTS, bundle_body, file_entry
from tests.support.holdings import settings
from tests.support.outage import door
from tests.support.together import together
from tests.support.uploads import arrived, begin, incoming, offset, patch, request, settled, status, stored

CONTENT = random.Random(7).randbytes(3_000_000)
DIGEST = sha256_digest(CONTENT)


@pytest.fixture
def engineer(api):
    return api.clients["engineer"]


@pytest.fixture
def storage(api):
    return api.service.settings.storage_dir


def test_a_blob_arrives_in_pieces_and_is_verified_with_the_last(engineer, api, storage):
    made = begin(engineer, CONTENT)
    assert (made["offset"], made["size"], made["is_complete"]) == (0, len(CONTENT), False)
    there = 0
    for piece in (CONTENT[:1], CONTENT[1:1_500_000], b"", CONTENT[1_500_000:-1]):
        answer = patch(engineer, made["id"], there, piece)
        there += len(piece)
        assert (answer.status_code, answer.json()["offset"]) == (200, there)
        assert answer.headers["upload-offset"] == str(there) == str(offset(engineer, made["id"]))
        assert engineer.head(f"/v1/blobs/{DIGEST}").status_code == 404
    last = patch(engineer, made["id"], there, CONTENT[-1:]).json()
    assert (last["is_complete"], last["offset"]) == (True, len(CONTENT))
    assert api.clients["runner"].get(f"/v1/blobs/{DIGEST}").content == CONTENT
    assert incoming(storage) == []
    assert engineer.get(f"/v1/uploads/{made['id']}").status_code == 404
    again = engineer.post("/v1/uploads", json={"digest": DIGEST, "size": len(CONTENT)})
    assert (again.status_code, again.json()["id"], again.json()["is_complete"]) == (200, None, True)


def test_what_came_before_a_cut_is_kept_and_whoever_lost_the_id_takes_it_up(engineer, api):
    made = begin(engineer, CONTENT)
    path = f"/v1/uploads/{made['id']}"
    with request(api.url, api.tokens["engineer"], "PATCH", path, len(CONTENT), upload_offset="0") as cut:
        cut.sendall(CONTENT[:1_234_567])
        time.sleep(0.2)
    assert settled(engineer, made["id"], 1_234_567) == 1_234_567
    found = begin(engineer, CONTENT)
    assert (found["id"], found["offset"]) == (made["id"], 1_234_567)
    assert [one["offset"] for one in engineer.get("/v1/uploads").json()["items"]] == [1_234_567]
    assert patch(engineer, made["id"], 1_234_567, CONTENT[1_234_567:]).json()["is_complete"]
    assert engineer.get(f"/v1/blobs/{DIGEST}").content == CONTENT


@pytest.mark.parametrize("wrong", [0, 99, 101, 10**12])
def test_bytes_at_another_offset_are_refused_with_the_right_one(engineer, wrong):
    made = begin(engineer, CONTENT)
    patch(engineer, made["id"], 0, CONTENT[:100])
    refused = patch(engineer, made["id"], wrong, CONTENT[100:200])
    assert (refused.status_code, refused.json()["offset"]) == (409, 100)
    assert refused.json()["type"].endswith("/offset-mismatch")
    assert offset(engineer, made["id"]) == 100


@pytest.mark.parametrize("body", [CONTENT + b"!", iter([CONTENT, b"!"])], ids=["announced", "streamed"])
def test_more_bytes_than_were_announced_are_refused_and_not_kept(engineer, body):
    made = begin(engineer, CONTENT)
    assert patch(engineer, made["id"], 0, body).status_code == 413
    assert offset(engineer, made["id"]) == 0
    assert patch(engineer, made["id"], 0, CONTENT).json()["is_complete"]


def test_bytes_with_another_digest_end_the_upload_and_leave_nothing(engineer, storage):
    made = begin(engineer, CONTENT)
    patch(engineer, made["id"], 0, CONTENT[:1000])
    refused = patch(engineer, made["id"], 1000, CONTENT[1000:-1] + b"!")
    assert (refused.status_code, refused.json()["expected"]) == (422, DIGEST)
    assert offset_status(engineer, made["id"]) == 404
    assert (incoming(storage), stored(storage)) == ([], [])
    assert begin(engineer, CONTENT)["offset"] == 0


def offset_status(client, upload):
    return client.head(f"/v1/uploads/{upload}").status_code


def test_of_two_who_write_at_once_one_does_and_the_other_is_told(engineer, api):
    made = begin(engineer, CONTENT)
    go = threading.Event()

    def slowly():
        yield CONTENT[:1_500_000]
        go.wait(10)
        yield CONTENT[1_500_000:]

    first = {}
    writing = threading.Thread(target=lambda: first.update(answer=patch(engineer, made["id"], 0, slowly()).json()))
    writing.start()
    with api.client(api.tokens["ci"]) as other:
        arrived(other, made["id"], 1)
        refused = patch(other, made["id"], 5, b"x").json()
        assert (refused["is_held"], refused["type"].rsplit("/", 1)[1]) == (True, "offset-mismatch")
        go.set()
        writing.join()
    assert first["answer"]["is_complete"]
    assert engineer.get(f"/v1/blobs/{DIGEST}").content == CONTENT


def test_many_who_send_one_blob_at_once_all_end_with_it(api, storage):
    """Each loses to another now and then, and goes on where that one stopped."""
    storage.parent.joinpath("file").write_bytes(CONTENT)

    def send():
        with Client(api.url, api.tokens["engineer"]) as client:
            uploader = Uploader(client._transport, in_pieces_from=1, piece=200_000)
            return client.blobs.upload(DIGEST, storage.parent / "file", uploader=uploader)

    assert [sent.size for sent in together(*[send] * 4)] == [len(CONTENT)] * 4
    assert (incoming(storage), stored(storage)) == ([], [DIGEST])


def test_another_project_neither_sees_nor_touches_an_upload(engineer, api):
    made = begin(engineer, CONTENT)
    patch(engineer, made["id"], 0, CONTENT[:10])
    with api.client(make_tokens(api.service, "team-b")["engineer"]) as theirs:
        assert offset_status(theirs, made["id"]) == 404
        assert patch(theirs, made["id"], 10, CONTENT[10:]).status_code == 404
        assert theirs.delete(f"/v1/uploads/{made['id']}").status_code == 404
        assert theirs.get("/v1/uploads").json()["items"] == []
        own = begin(theirs, CONTENT)
        assert (own["offset"], own["id"] == made["id"]) == (0, False)
    assert offset(engineer, made["id"]) == 10


def test_an_upload_is_given_up_with_its_bytes(engineer, storage):
    made = begin(engineer, CONTENT)
    patch(engineer, made["id"], 0, CONTENT[:10])
    assert engineer.delete(f"/v1/uploads/{made['id']}").status_code == 204
    assert incoming(storage) == []
    assert patch(engineer, made["id"], 10, CONTENT[10:]).status_code == 404
    assert incoming(storage) == []


@pytest.mark.parametrize("before", [0, 500_000])
def test_an_upload_given_up_while_it_is_written_to_is_not_stored(engineer, api, storage, before):
    """Also where an earlier request has brought some of it, so that all has to be read once more in the end."""
    made = begin(engineer, CONTENT)
    path = f"/v1/uploads/{made['id']}"
    if before:
        assert patch(engineer, made["id"], 0, CONTENT[:before]).status_code == 200
    size = len(CONTENT) - before
    with request(api.url, api.tokens["engineer"], "PATCH", path, size, upload_offset=f"{before}") as writing:
        writing.sendall(CONTENT[before:1_700_000])
        arrived(engineer, made["id"], before + 1)
        assert engineer.delete(path).status_code == 204
        writing.sendall(CONTENT[1_700_000:])
        assert status(writing) == 404
    assert (incoming(storage), stored(storage)) == ([], [])


def test_an_upload_that_was_silent_for_too_long_is_taken_away_and_one_that_grows_is_not(engineer, api, storage):
    old, grown, new = (begin(engineer, content) for content in (CONTENT, CONTENT[1:], CONTENT[2:]))
    for made in (old, grown, new):
        patch(engineer, made["id"], 0, b"abc")
    long_ago = time.time() - 2 * api.service.settings.upload_seconds
    os.utime(storage / "incoming" / f"{old['id']}.part", (long_ago, long_ago))
    with api.service.database.transaction() as session:
        for made in (old, grown):
            row = uploads.get(session, api.project_id, made["id"])
            row.touched_at = row.touched_at.replace(year=2020)
    assert housekeeping.tidy(api.service)["uploads_expired"] == 1
    assert incoming(storage) == sorted(f"{made['id']}.part" for made in (grown, new))
    assert offset_status(engineer, old["id"]) == 404
    assert uploads.expire(api.service) == 0
    assert begin(engineer, CONTENT)["offset"] == 0


KINDS = ("put cut", "put wrong", "put large", "cut", "wrong", "long", "short", "offset", "too much", "document")
DOCUMENTS = {
    "no JSON": b"{",
    "a key twice": b'{"name": "a", "name": "a"}',
    "no bundle": b'{"schema": "sluicegate.dev/bundle/v1"}',
    "bytes missing": json.dumps(bundle_body()).encode(),
    "pickled": json.dumps(bundle_body(files=[file_entry("model.bin", WEIGHTS, "weights")])).encode(),
}


def counted(service):
    """Return how many rows there are, by table; of the parts that a use is added up in, what they add up to."""
    with service.database.transaction() as session:
        tables = Base.metadata.tables.values()
        rows = {table.name: session.scalar(select(func.count()).select_from(table)) for table in tables}
        sums = select(func.sum(ProjectUsageRow.bytes), func.sum(ProjectUsageRow.documents))
        return rows | {ProjectUsageRow.__tablename__: tuple(session.execute(sums).one())}


def test_two_hundred_ingests_that_fail_leave_no_file_and_no_row(engineer, api, storage):
    chance = random.Random(11)
    content = CONTENT[:300_000]
    # The first one makes a row in which the project's use is added up.
    assert engineer.delete(f"/v1/uploads/{begin(engineer, content)['id']}").status_code == 204
    before, kinds = counted(api.service), []
    for place in range(200):
        mine = content + bytes([place])
        kinds.append(kind := chance.choice(KINDS))
        fail(kind, mine, place, chance, engineer, api)
    assert set(kinds) == set(KINDS)
    parts = [one["id"] for page in pages(engineer) for one in page]
    # Whoever was cut is noticed when the next bytes are read; then only what may go on is there.
    ends = time.monotonic() + 10
    while left := [name for name in incoming(storage) if name.removesuffix(".part") not in parts]:
        assert time.monotonic() < ends, left
        time.sleep(0.02)
    assert counted(api.service) == before | {"uploads": before["uploads"] + len(parts)}
    assert stored(storage) == []
    # What is kept to be gone on with goes when nobody has done so for long.
    with api.service.database.transaction() as session:
        session.execute(update(UploadRow).values(touched_at=func.now() - timedelta(days=30)))
    for name in incoming(storage):
        os.utime(storage / "incoming" / name, (1, 1))
    while uploads.expire(api.service):
        pass
    assert (incoming(storage), stored(storage), counted(api.service)) == ([], [], before)


def fail(kind, mine, place, chance, engineer, api):
    """Send something that is refused, or that stops on the way."""
    cut_at = chance.randrange(1, len(mine))
    path, length = f"/v1/blobs/{sha256_digest(mine)}", len(mine)
    if kind == "document":
        name, raw = chance.choice(sorted(DOCUMENTS.items()))
        answer = engineer.post("/v1/bundles", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 422, name
    elif kind == "put cut":
        with request(api.url, api.tokens["engineer"], "PUT", path, length) as cut:
            cut.sendall(mine[:cut_at])
    elif kind == "put wrong":
        assert engineer.put(path, content=mine[:-1] + b"!!").status_code == 422
    elif kind == "put large":
        with settings(api.service, max_blob_bytes=cut_at):
            assert engineer.put(path, content=iter([mine])).status_code == 413
    elif kind == "too much":
        with settings(api.service, project_bytes=cut_at):
            assert engineer.put(path, content=mine).status_code == 409
            assert engineer.post("/v1/uploads", json={"digest": sha256_digest(mine), "size": length}).status_code == 409
    else:
        fail_in_pieces(kind, mine, place, cut_at, engineer, api)


def fail_in_pieces(kind, mine, place, cut_at, engineer, api):
    made = begin(engineer, mine)
    if kind == "cut":
        path = f"/v1/uploads/{made['id']}"
        with request(api.url, api.tokens["engineer"], "PATCH", path, len(mine), upload_offset="0") as cut:
            cut.sendall(mine[:cut_at])
    elif kind == "wrong":
        assert patch(engineer, made["id"], 0, mine[:-1] + bytes([place ^ 1])).status_code == 422
    elif kind == "long":
        assert patch(engineer, made["id"], 0, iter([mine, b"!"])).status_code == 413
    elif kind == "short":
        assert patch(engineer, made["id"], 0, mine[:cut_at]).json()["offset"] == cut_at
    else:
        assert patch(engineer, made["id"], 1 + cut_at, mine[1 + cut_at :]).status_code == 409
    if kind != "wrong" and place % 2:  # half of them are given up, and the others may go on
        assert engineer.delete(f"/v1/uploads/{made['id']}").status_code == 204


def pages(client):
    cursor = ""
    while cursor is not None:
        answer = client.get("/v1/uploads", params={"limit": 50, **({"cursor": cursor} if cursor else {})}).json()
        yield answer["items"]
        cursor = answer["next"]


def test_an_upload_goes_on_after_the_service_was_killed_and_through_another_process(service, tmp_path):
    tokens = make_tokens(service, "default")
    ports = free_port(), free_port()
    processes = [start(environment(service), "--port", str(port)) for port in ports]
    one, two = (
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {tokens['ci']}"},
            verify=NO_AUTHORITY,
        )
        for port in ports
    )
    try:
        for client in (one, two):
            answers(client)
        made = begin(one, CONTENT)
        assert patch(two, made["id"], 0, CONTENT[:500_000]).json()["offset"] == 500_000
        path = f"/v1/uploads/{made['id']}"
        with request(str(one.base_url), tokens["ci"], "PATCH", path, 2_500_000, upload_offset="500000") as cut:
            cut.sendall(CONTENT[500_000:2_000_000])
            ends = time.monotonic() + 10
            while offset(two, made["id"]) <= 1_000_000:
                assert time.monotonic() < ends, (offset(two, made["id"]), status(cut))
                time.sleep(0.1)
            # Held by the first process, and free at the moment when that is gone.
            assert patch(two, made["id"], 0, b"").json()["is_held"] is True
            processes[0].send_signal(signal.SIGKILL)
            processes[0].wait(10)
        there = begin(two, CONTENT)["offset"]
        assert 1_000_000 < there <= 2_000_000
        assert patch(two, made["id"], there, CONTENT[there:]).json()["is_complete"]
        assert two.get(f"/v1/blobs/{DIGEST}").content == CONTENT
        assert incoming(service.settings.storage_dir) == []
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=20)
        one.close()
        two.close()


def answers(client):
    ends = time.monotonic() + 30
    while True:
        try:
            assert client.get("/v1/me").status_code == 200
        except httpx.TransportError:
            assert time.monotonic() < ends
            time.sleep(0.05)
        else:
            return


def test_one_that_was_killed_before_it_was_recorded_is_completed_by_asking_again(engineer, api, storage):
    """The bytes are in their place, and the row is not: as after a kill between the two."""
    made = begin(engineer, CONTENT)
    patch(engineer, made["id"], 0, CONTENT[:-1])
    with api.service.blobs.part(made["id"]) as part:
        part.write(CONTENT[-1:], limit=len(CONTENT))
        part.seal(DIGEST)
        part.place()
    assert stored(storage) == [DIGEST]
    assert begin(engineer, CONTENT)["offset"] == len(CONTENT)
    assert patch(engineer, made["id"], len(CONTENT), b"").json()["is_complete"]
    assert engineer.get(f"/v1/blobs/{DIGEST}").content == CONTENT
    assert incoming(storage) == []


# ------------------------------------------------------------------------------------------------- the client


def test_the_client_goes_on_after_a_cut_and_sends_little_twice(api, storage, tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    moved, cut = [], []
    with door(api.url) as between, Client(between.url, api.tokens["engineer"]) as client:

        def progress(count):
            before = sum(moved)
            moved.append(count)
            # Once: what is sent again passes this mark again.
            if before < 2_000_000 <= sum(moved) and not cut:
                cut.append(before)
                between.shut()
                threading.Timer(0.2, between.open).start()

        uploader = Uploader(client._transport, in_pieces_from=1, piece=1_000_000)
        sent = client.blobs.upload(DIGEST, tmp_path / "file", progress=progress, uploader=uploader)
    assert sent.size == sum(moved) == len(CONTENT)
    assert len(CONTENT) <= sent.sent <= len(CONTENT) + 1_100_000
    assert api.clients["engineer"].get(f"/v1/blobs/{DIGEST}").content == CONTENT
    assert incoming(storage) == []


def test_a_client_that_is_started_again_sends_only_the_rest(api, engineer, tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    patch(engineer, begin(engineer, CONTENT)["id"], 0, CONTENT[:2_000_000])
    moved = []
    with Client(api.url, api.tokens["engineer"]) as client:
        uploader = Uploader(client._transport, in_pieces_from=1)
        sent = client.blobs.upload(DIGEST, tmp_path / "file", progress=moved.append, uploader=uploader)
        assert (sent.sent, sent.resumed_at, sum(moved)) == (1_000_000, 2_000_000, len(CONTENT))
        assert list(client.blobs.uploads()) == []


def test_a_client_gives_up_when_nothing_arrives_for_long_and_at_once_when_the_file_is_another(api, tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    with door(api.url) as between, Client(between.url, api.tokens["engineer"]) as client:
        quick = Uploader(client._transport, in_pieces_from=1, patience_seconds=0.2)
        with pytest.raises(DigestMismatch):
            client.blobs.upload(sha256_digest(b"other"), tmp_path / "file", uploader=quick)
        between.shut()
        with pytest.raises(Unavailable):
            client.blobs.upload(DIGEST, tmp_path / "file", uploader=quick)


# ------------------------------------------------------------------------------------------------- slow callers


@pytest.fixture
def impatient(service):
    """An interface that bears 1 s of silence, and receives few blobs at once."""
    changes = {"body_silence_seconds": 1.0, "body_bytes_per_second": 1000, "body_places": 40}
    settings = service.settings.model_copy(update=changes)
    with Api(Service(settings, service.database, service.signer, service.blobs)) as running:
        yield running


class Trickle:
    """Uploads that send a byte now and then until they are told that it is enough."""

    def __init__(self, api, role, count):
        self.statuses, self._api, self._role = [], api, role
        self._threads = [threading.Thread(target=self._run, args=(place,)) for place in range(count)]

    def _run(self, place):
        path = f"/v1/blobs/{sha256_digest(bytes([place]) * 1000)}"
        with request(self._api.url, self._api.tokens[self._role], "PUT", path, 1000) as connection:
            connection.settimeout(0.1)
            for _ in range(1000):
                try:
                    connection.sendall(bytes([place]))
                    self.statuses.append(status(connection))
                    return
                except TimeoutError:
                    continue

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in self._threads)


def test_callers_that_trickle_keep_nobody_waiting_and_are_cut(impatient):
    with Trickle(impatient, "engineer", 16) as slow:
        while len(incoming(impatient.service.settings.storage_dir)) < 16:
            time.sleep(0.01)
        began = time.monotonic()
        for role in ("engineer", "ci"):
            content = CONTENT + role.encode()
            made = begin(impatient.clients[role], content)
            assert patch(impatient.clients[role], made["id"], 0, content).json()["is_complete"]
        assert time.monotonic() - began < 1.0
    assert slow.statuses == [408] * 16
    assert incoming(impatient.service.settings.storage_dir) == []


def test_one_token_does_not_take_all_places(impatient):
    with Trickle(impatient, "engineer", 60) as slow:
        ends = time.monotonic() + 5
        while 429 not in slow.statuses:
            assert time.monotonic() < ends
            time.sleep(0.01)
        answer = impatient.clients["ci"].put(f"/v1/blobs/{DIGEST}", content=CONTENT)
        assert answer.status_code == 201
    assert slow.statuses.count(429) == 40
    assert slow.statuses.count(408) == 20


WHOLE = b"GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connections_without_a_request_end_as_does_a_document_that_trickles_and_a_steady_blob_does_not(impatient):
    """A stranger who opens thousands of them, and sends next to nothing, keeps nobody out."""
    host, _, port = impatient.url.removeprefix("http://").partition(":")
    sent = {"silent": b"", "blank": b"\r\n", "half": WHOLE[:-2], "second": WHOLE}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for name in sent}
        for name, raw in sent.items():
            opened[name].sendall(raw)
        assert status(opened["second"]) == 200
        opened["second"].sendall(b"\r\n" + WHOLE[:9])
        document = stack.enter_context(request(impatient.url, impatient.tokens["ci"], "POST", "/v1/uploads", 100))
        document.sendall(b"{")
        began = time.monotonic()
        assert status(document) == 408
        assert 0.8 < time.monotonic() - began < 3
        heard = {name: b"".join(iter(partial(one.recv, 65536), b"")) for name, one in opened.items()}
    assert (heard["silent"], heard["blank"]) == (b"", b"")
    for name in ("half", "second"):
        head, _, body = heard[name][heard[name].index(b"HTTP/1.1 408 ") :].partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert json.loads(body)["type"].endswith("/too-slow")

    def steady():
        for start_ in range(0, 5000, 500):
            time.sleep(0.25)
            yield CONTENT[start_ : start_ + 500]

    content = CONTENT[:5000]
    assert impatient.clients["ci"].put(f"/v1/blobs/{sha256_digest(content)}", content=steady()).status_code == 201
