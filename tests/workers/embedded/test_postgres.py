import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psycopg
import pytest

from tests.support.embedded import runs, until
from workers.embedded import postgres
from workers.embedded.layout import DataRefused, Layout
from workers.embedded.parts import program_environment
from workers.embedded.supervisor import Ending, Supervisor


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    made = Layout(tmp_path_factory.mktemp("postgres") / "my data")
    made.prepare()
    (made.root / "postgres.new").mkdir()  # a start that was killed in the middle
    (made.root / "postgres.new" / "PG_VERSION").write_text("18\n")
    postgres.prepare(made, program_environment(made), lambda _: None)
    return made


def test_it_serves_on_a_socket_that_only_its_owner_reaches(layout):
    part = postgres.part(layout, program_environment(layout))
    supervisor = Supervisor([part], logs=layout.logs, record=layout.processes, say=lambda _: None)
    ready, found = threading.Event(), []

    def act():
        ready.wait(60)
        with psycopg.connect(postgres.url(layout, "postgres").replace("+psycopg", "")) as connection:
            settings = ("listen_addresses", "server_encoding", "timezone", "fsync", "data_checksums")
            found.extend(connection.execute(f"SHOW {setting}").fetchone()[0] for setting in settings)
        os.kill(os.getpid(), signal.SIGTERM)

    actor = threading.Thread(target=act, daemon=True)
    actor.start()
    assert supervisor.run(ready.set, wait_seconds=60).ending is Ending.ASKED
    actor.join(5)
    assert found == ["", "UTF8", "UTC", "on", "on"]
    assert layout.sockets.stat().st_mode & 0o777 == 0o700
    assert "database system is shut down" in (layout.logs / "postgres.log").read_text()


def test_a_lock_whose_process_is_somebody_else_by_now_does_not_block(layout):
    lock = layout.postgres / "postmaster.pid"
    lock.write_text(f"{os.getpid()}\n{layout.postgres}\n1764000000\n5432\n{layout.sockets}\n\n\nready   \n")
    said = []
    postgres.prepare(layout, program_environment(layout), said.append)
    assert not lock.exists()
    assert said == []


def test_a_server_that_an_earlier_start_left_is_ended_and_who_looks_at_its_data_is_not(layout, tmp_path):
    program = Path(shutil.copy("/bin/sleep", tmp_path / "postgres"))
    left = subprocess.Popen([program, "600"], cwd=layout.postgres, start_new_session=True)
    other = subprocess.Popen(["/bin/sleep", "600"], cwd=layout.postgres, start_new_session=True)
    said = []
    try:
        until(lambda: Path(f"/proc/{left.pid}/exe").readlink() == program)
        postgres.prepare(layout, program_environment(layout), said.append)
        assert left.wait(5) == -signal.SIGTERM
        assert runs(other.pid)
    finally:
        left.kill()
        other.kill()
        other.wait()
    assert said == ["ending 1 processes of PostgreSQL left by an earlier start"]


def test_data_that_were_not_finished_were_made_anew(layout):
    assert (layout.postgres / "global").is_dir()
    assert not (layout.root / "postgres.new").exists()


def test_a_failure_of_the_first_start_is_told_in_the_words_of_the_program(tmp_path, monkeypatch):
    layout = Layout(tmp_path / "data")
    layout.prepare()
    (tmp_path / "initdb").write_text("#!/bin/sh\necho 'initdb: error: no space left' >&2\nexit 1\n")
    (tmp_path / "initdb").chmod(0o755)
    monkeypatch.setattr(postgres, "binaries", lambda: tmp_path)
    with pytest.raises(DataRefused, match="initdb failed: initdb: error: no space left") as caught:
        postgres.prepare(layout, program_environment(layout), lambda _: None)
    assert caught.value.status == 4
    assert not layout.postgres.exists()
