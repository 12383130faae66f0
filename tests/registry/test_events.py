"""The log as it grows: over HTTP, through the client and on the command line, across restarts and expiry."""

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import text

from gates.plain import NO_AUTHORITY
from registry import auth, cursors, db, projects
from registry.api import bell, events
from registry.client import Client
from registry.cursors import Cursor
from schemas import problems
from schemas.api import Event
from schemas.evidence import Kind, Note, Reasoned, Staged
from tests.registry.test_api_process import environment, free_port, start, wait_until_ready
from tests.registry.test_cursors import append
from tests.support.api import ROLES, Api, make_tokens
from tests.support.factories import created_target, record_act, started_release
from tests.support.outage import Door

THERE = 1 + len(ROLES)
"""Entries that are there from the beginning: a token for each role."""
STAGED = Staged(files=1, size=19, duration_ms=3)


@contextmanager
def written(service, project: UUID, *streams: str) -> Iterator[None]:
    with service.database.transaction() as session:
        for stream in streams:
            append(session, service, project, stream, str(uuid4()))
        yield


def write(service, project: UUID, *streams: str) -> None:
    with written(service, project, *streams):
        pass


class Watcher:
    """Follows the log in a thread; `seen` is what it was told."""

    def __init__(self, url: str, token: str, **asked) -> None:
        self.seen: list[Event] = []
        self.away: list[str] = []
        self.problem: Exception | None = None
        self.heard = threading.Condition()
        self._client = Client(url, token)
        self._asked = {"seconds": 60, "on_away": lambda problem: self.away.append(problem.detail), **asked}
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        try:
            for event in self._client.events(**self._asked):
                with self.heard:
                    self.seen.append(event)
                    self.heard.notify_all()
        except problems.Problem as problem:
            self.problem = problem
        with self.heard:
            self.heard.notify_all()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._client.close()
        self.wait_for_end()

    def wait(self, count: int, seconds: float = 20) -> list[str]:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.seen) >= count or self.problem, seconds), self.told
        return self.told

    def wait_for_end(self, seconds: float = 20) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()

    @property
    def told(self) -> list[str]:
        return [f"{event.entry.stream} {event.entry.position}" for event in self.seen]


def test_what_is_there_is_told_and_then_what_happens(committed):
    with Api(committed) as api:
        write(committed, api.project_id, "target/a", "target/a")
        with Watcher(api.url, api.tokens["engineer"]) as watcher:
            assert watcher.wait(THERE + 2)[-2:] == ["target/a 1", "target/a 2"]
            for number in range(3, 8):
                before = time.monotonic()
                write(committed, api.project_id, "target/a")
                assert watcher.wait(THERE + number)[-1] == f"target/a {number}"
                # Rung for, not found on the next look.
                assert time.monotonic() - before < events.LOOK_SECONDS / 2


def test_an_entry_that_must_wait_for_an_older_transaction_is_told_when_that_ends(committed):
    with Api(committed) as api, Watcher(api.url, api.tokens["engineer"], target=None) as watcher:
        watcher.wait(THERE)
        with committed.database.transaction() as old:
            old.execute(text("SELECT pg_current_xact_id()"))
            write(committed, api.project_id, "target/young")
            time.sleep(0.6)
            assert len(watcher.seen) == THERE
        before = time.monotonic()
        assert watcher.wait(THERE + 1)[-1] == "target/young 1"
        assert time.monotonic() - before < events.LOOK_SECONDS / 2


def test_a_stream_tells_only_what_was_asked_for(committed, actor):
    release = started_release(committed, actor)
    created_target(committed, actor, "other@prod")
    record_act(committed, release, Kind.STAGED, STAGED)
    record_act(committed, release, Kind.HELD, Reasoned(reasons=["why"]))
    with Api(committed) as api, Client(api.url, api.tokens["engineer"]) as client:

        def kinds(count: int, **asked) -> list[str]:
            return [str(event.entry.kind) for event in itertools.islice(client.events(seconds=30, **asked), count)]

        assert kinds(3, release=release) == ["created", "staged", "held"]
        assert kinds(1, stream=f"release/{release}", kinds=[Kind.STAGED]) == ["staged"]
        assert kinds(2, stream=f"release/{release}", kinds=[Kind.HELD, Kind.STAGED]) == ["staged", "held"]
        assert kinds(4, target="chat@prod") == ["target_created", "created", "staged", "held"]
        (one,) = itertools.islice(client.events(seconds=30, kinds=[Kind.STAGED]), 1)
        assert kinds(1, after=one.cursor) == ["held"]
        with pytest.raises(problems.NotFound):
            kinds(1, target="nowhere@prod")
        with pytest.raises(problems.InvalidDocument):
            kinds(1, after="x")
        with pytest.raises(problems.InvalidDocument):
            kinds(1, stream="a/b", release=release)


def test_another_project_s_entries_are_not_told(committed):
    theirs = make_tokens(committed, "theirs")["engineer"]
    with Api(committed) as api, Watcher(api.url, theirs, seconds=2) as watcher:
        watcher.wait(THERE)
        write(committed, api.project_id, "target/ours")
        watcher.wait_for_end()
        assert {event.entry.stream.split("/")[0] for event in watcher.seen} == {"project"}


def test_a_watcher_ends_when_its_time_is_up_though_nothing_happens(committed):
    with Api(committed) as api, Client(api.url, api.tokens["engineer"]) as client:
        before = time.monotonic()
        assert len(list(client.events(seconds=3))) == THERE
        assert 2.9 < time.monotonic() - before < 5


def test_a_watcher_gets_every_entry_exactly_once_though_the_process_is_killed(committed):
    """Killed in the middle of telling, with entries written before, while it is away, and after."""
    tokens = make_tokens(committed, "default")
    with committed.database.transaction() as session:
        project = projects.named(session, "default").id
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    stop, count = threading.Event(), 0

    def keep_writing() -> None:
        nonlocal count
        while not stop.is_set():
            write(committed, project, f"target/{count % 3}")
            count += 1
            time.sleep(0.01)

    writer = threading.Thread(target=keep_writing)
    process = start(environment(committed), "--port", str(port))
    try:
        wait_until_ready(process, url)
        with Watcher(url, tokens["engineer"]) as watcher:
            watcher.wait(THERE)
            writer.start()
            watcher.wait(THERE + 20)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            process = start(environment(committed), "--port", str(port))
            wait_until_ready(process, url)
            watcher.wait(len(watcher.seen) + 20, 30)
            stop.set()
            writer.join()
            told = watcher.wait(THERE + count, 30)
            assert len(watcher.away) == 1
    finally:
        stop.set()
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert len(told) == len(set(told)) == THERE + count
    for stream in range(3):
        mine = [one for one in told if one.startswith(f"target/{stream} ")]
        assert mine == [f"target/{stream} {position}" for position in range(1, len(mine) + 1)]
    # The stream that was open when it was told to end did not keep it.
    assert process.returncode == 0
    assert "bell_lost" not in logged
    assert "Traceback" not in logged


def test_a_cut_connection_is_made_anew_and_a_service_that_was_never_there_is_a_problem(committed):
    with Api(committed) as api:
        door = Door(api.url)
        with Watcher(door.url, api.tokens["engineer"]) as watcher:
            watcher.wait(THERE)
            door.shut()
            write(committed, api.project_id, "target/a")
            time.sleep(0.3)
            door.open()
            write(committed, api.project_id, "target/a")
            assert watcher.wait(THERE + 2)[THERE:] == ["target/a 1", "target/a 2"]
        door.close()
    with Client(f"http://127.0.0.1:{free_port()}", "slg_x") as client, pytest.raises(problems.Unavailable):
        list(client.events(seconds=30))


def test_a_stream_ends_with_its_token(committed, monkeypatch):
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.2)
    with Api(committed) as api:
        with committed.database.transaction() as session:
            now = db.now(session)
            project = projects.named(session, "default")
            short = auth.create_token(
                session,
                committed,
                project,
                "short",
                "engineer",
                by="test",
                now=now,
                expires_at=now + timedelta(seconds=1),
            )
        with Watcher(api.url, short.secret) as watcher:
            watcher.wait_for_end()
        assert isinstance(watcher.problem, problems.Unauthenticated)
        assert len(watcher.seen) == THERE + 1
        runner = httpx.get(
            f"{api.url}/v1/events",
            headers={"authorization": f"Bearer {api.tokens['runner']}"},
            trust_env=False,
            verify=NO_AUTHORITY,
        )
        assert runner.status_code == 403
        assert httpx.get(f"{api.url}/v1/events", trust_env=False, verify=NO_AUTHORITY).status_code == 401


def test_a_quiet_stream_says_that_it_lives_and_where_it_is(committed, monkeypatch):
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.3)
    with Api(committed) as api:
        asked = {"kind": "promoted"}
        with api.clients["engineer"].stream("GET", "/v1/events", params=asked) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            said = ""
            for chunk in answer.iter_text():
                said += chunk
                if said.count(": nothing new") == 2:
                    break
        assert "data:" not in said
        last = [line.removeprefix("id: ") for line in said.splitlines() if line.startswith("id: ")][-1]
        with committed.database.transaction() as session:
            # Not searched again: the whole log so far has been looked through.
            assert Cursor.parse(last) <= Cursor.ahead_of(cursors.horizon(session))
            assert Cursor.parse(last) > cursors.START


def test_streams_are_bounded_and_what_a_caller_leaves_is_free_again(committed, monkeypatch):
    monkeypatch.setattr(bell, "MAX_STREAMS", 3)
    with Api(committed) as api:
        engineer = api.clients["engineer"]
        with Watcher(api.url, api.tokens["engineer"]) as one, Watcher(api.url, api.tokens["engineer"]) as two:
            one.wait(THERE)
            two.wait(THERE)
            # One place is left, for somebody else.
            with Watcher(api.url, api.tokens["viewer"]) as other:
                refused = engineer.get("/v1/events")
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
                assert "as many streams" in refused.json()["detail"]
                other.wait(THERE)
                assert api.clients["auditor"].get("/v1/events").status_code == 503
        deadline = time.monotonic() + 20
        while engineer.get("/v1/events", params={"after": "x"}).status_code != 422 and time.monotonic() < deadline:
            time.sleep(0.1)
        with Client(api.url, api.tokens["engineer"]) as client:
            while True:
                try:
                    assert len(list(client.events(seconds=3))) == THERE
                    break
                except problems.Unavailable:
                    assert time.monotonic() < deadline


def bells(service, asked: str) -> list[object]:
    """Return what a question to the database says of each bell that listens."""
    with service.database.transaction() as session:
        listening = "application_name = 'sluicegate bell' AND datname = current_database() AND state = 'idle'"
        return list(session.scalars(text(f"SELECT {asked} FROM pg_stat_activity WHERE {listening}")))


def wait_for_bells(service, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(bells(service, "pid")) != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_bell_that_is_lost_is_hung_up_again(committed):
    with Api(committed) as api, Watcher(api.url, api.tokens["engineer"]) as watcher:
        watcher.wait(THERE)
        wait_for_bells(committed, 1)
        assert bells(committed, "pg_terminate_backend(pid)") == [True]
        write(committed, api.project_id, "target/a")
        assert watcher.wait(THERE + 1)[-1] == "target/a 1"
        time.sleep(bell.RETRY_SECONDS + 0.5)
        before = time.monotonic()
        write(committed, api.project_id, "target/a")
        assert watcher.wait(THERE + 2)[-1] == "target/a 2"
        assert time.monotonic() - before < events.LOOK_SECONDS / 2


def test_a_bell_listens_while_somebody_waits_and_tells_what_was_written_before(committed, monkeypatch):
    monkeypatch.setattr(bell, "LINGER_SECONDS", 0.0)
    # Nobody looks without being rung for.
    monkeypatch.setattr(events, "LOOK_SECONDS", 1000.0)
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 1000.0)
    with Api(committed) as api:
        write(committed, api.project_id, "target/a")
        assert bells(committed, "pid") == []
        with committed.database.transaction() as old:
            old.execute(text("SELECT pg_current_xact_id()"))
            write(committed, api.project_id, "target/a")
            with Watcher(api.url, api.tokens["engineer"]) as watcher:
                watcher.wait(THERE + 1)
                wait_for_bells(committed, 1)
                assert len(watcher.seen) == THERE + 1
                old.rollback()  # which tells nobody
                assert watcher.wait(THERE + 2)[-1] == "target/a 2"
                write(committed, api.project_id, "target/a")
                assert watcher.wait(THERE + 3)[-1] == "target/a 3"
        deadline = time.monotonic() + 20
        while bells(committed, "pid"):
            assert time.monotonic() < deadline
            write(committed, api.project_id, "target/b")
            time.sleep(0.02)


def test_entries_with_any_text_in_them_arrive_whole(committed, actor):
    """Line separators that JSON leaves alone must not cut an event in two."""
    release = started_release(committed, actor)
    reason = "a\u2028b\x85c\nd\r\ne: f\x0bg \U0001f600"
    record_act(committed, release, Kind.PAUSED, Note(reason=reason))
    with Api(committed) as api, Client(api.url, api.tokens["engineer"]) as client:
        _, told = itertools.islice(client.events(release=release, seconds=30), 2)
        assert told.entry.body["reason"] == reason


def test_the_command_line_follows_the_log_and_goes_on_from_a_cursor(committed, actor, command):
    release = started_release(committed, actor)
    with Api(committed) as api:
        command.ok("login", api.url, "--token", api.tokens["engineer"])
        human = command.ok("evidence", "follow", "--target", "chat@prod", "--timeout", "2").out
        assert [line.split()[2].rstrip(":") for line in human.splitlines()] == ["target_created", "created"]
        first = command.ok("evidence", "follow", "--release", str(release), "--timeout", "2", "--json").json
        assert [entry["kind"] for entry in first["items"]] == ["created"]
        record_act(committed, release, Kind.STAGED, STAGED)
        on = ("--release", str(release), "--after", first["cursor"], "--timeout", "2", "--json")
        assert [entry["kind"] for entry in command.ok("evidence", "follow", *on).json["items"]] == ["staged"]
        assert command("evidence", "follow", "--json").status == 2
        assert command("evidence", "follow", *on[:3], "nonsense", *on[4:]).status == 2
