"""What reads for long for somebody who only asks: bounded by token, by process and in time."""

import threading
from uuid import uuid4

import pytest

from registry import auth
from registry.api import readings
from registry.api.readings import AT_ONCE, BURST_SECONDS, Readings
from registry.auth import Actor
from registry.client import Client
from schemas.common import sha256_digest
from schemas.problems import TooManyRequests
from tests.support.holdings import SHARED, held

BLOB = sha256_digest(SHARED)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def somebody():
    return Actor(uuid4(), "default", "maria", "viewer", token=uuid4())


def take(places, actor, clock, seconds):
    with places.place(actor):
        clock.now += seconds


def refused(places, actor):
    with pytest.raises(TooManyRequests) as problem, places.place(actor):
        pass
    return problem.value.members["retry_after_seconds"]


def test_a_token_has_one_under_way_and_a_process_a_few():
    places, first = Readings("reading"), somebody()
    with places.place(first):
        assert refused(places, first) == readings.BUSY_SECONDS
        with places.place(somebody()):
            assert AT_ONCE == 2
            assert refused(places, somebody()) == readings.BUSY_SECONDS
        with places.place(somebody()):
            pass
    with places.place(first):
        pass


def test_a_token_that_has_had_its_time_waits_until_some_has_come_back_and_no_other_does():
    clock = Clock()
    places, greedy = Readings("reading", share=0.25, clock=clock), somebody()
    take(places, greedy, clock, BURST_SECONDS / 2)
    take(places, greedy, clock, BURST_SECONDS)
    wait = refused(places, greedy)
    take(places, somebody(), clock, 0)
    clock.now += wait - 5
    assert 0 < refused(places, greedy) <= 5
    clock.now += 5
    take(places, greedy, clock, 0)
    # A silence brings back one burst, however long it was.
    clock.now += 10**6
    take(places, greedy, clock, BURST_SECONDS + 1)
    assert refused(places, greedy) > 0


def test_small_readings_one_after_another_are_not_held_up():
    clock = Clock()
    places, runner = Readings("reading", share=0.25, clock=clock), somebody()
    for _ in range(1000):
        take(places, runner, clock, 0.1)
        clock.now += 0.3


def test_a_time_that_is_forgotten_is_that_of_whoever_was_silent_longest(monkeypatch):
    monkeypatch.setattr(readings, "KEPT", 2)
    clock = Clock()
    places = Readings("reading", share=0.25, clock=clock)
    first, second, third = (somebody() for _ in range(3))
    for one in (first, second, third):
        take(places, one, clock, BURST_SECONDS * 2)
    take(places, first, clock, 0)
    assert refused(places, third) > 0


def test_blobs_that_are_read_again_keep_no_sender_waiting(own_api, monkeypatch):
    """Readers have every thread that reads again; a blob is received all the same, and they hear when to come again."""
    author = own_api.actor("engineer")
    held(own_api.service, author, "a")
    begun, end = threading.Semaphore(0), threading.Event()
    slow = own_api.service.blobs.open

    def opened(digest, **options):
        if options.get("is_verified"):
            begun.release()
            assert end.wait(20)
        return slow(digest, **options)

    monkeypatch.setattr(type(own_api.service.blobs), "open", lambda _, digest, **options: opened(digest, **options))
    answers = []

    def check(role):
        answers.append(own_api.clients[role].post(f"/v1/blobs/{BLOB}/checks").status_code)

    askers = [threading.Thread(target=check, args=(role,)) for role in ("viewer", "auditor")]
    try:
        for asker in askers:
            asker.start()
            assert begun.acquire(timeout=20)
        for role, said in (("viewer", "for this token"), ("engineer", f"for {AT_ONCE} others")):
            answer = own_api.clients[role].post(f"/v1/blobs/{BLOB}/checks")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, str(readings.BUSY_SECONDS))
            assert answer.json()["type"].endswith("too-many-requests")
            assert said in answer.json()["detail"]
        sent = own_api.clients["engineer"].put(f"/v1/blobs/{sha256_digest(b'new')}", content=b"new")
        assert sent.status_code == 201
    finally:
        end.set()
        for asker in askers:
            asker.join()
    assert answers == [200, 200]
    with Client(own_api.url, own_api.tokens["engineer"]) as client:
        assert client.blobs.check(BLOB).is_intact


def test_evidence_is_verified_once_at_a_time_for_a_token(own_api):
    places = own_api.app.state.verifications
    with own_api.service.database.look() as connection:
        actor = auth.authenticate(connection, own_api.tokens["viewer"])
    with places.place(actor):
        for path in ("verifications", "recomputations"):
            body = {"entry_digest": "sha256:" + "0" * 64} if path == "recomputations" else None
            answer = own_api.clients["viewer"].post(f"/v1/evidence/{path}", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, str(readings.BUSY_SECONDS))
        assert own_api.clients["auditor"].post("/v1/evidence/verifications").status_code == 200
    assert own_api.clients["viewer"].post("/v1/evidence/verifications").status_code == 200
