"""Ctrl-C at commands that wait: what goes on without them, and how to come back to it."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

from registry.cli import runners
from registry.cli.failures import Exit
from registry.client import Client

ROOT = Path(__file__).parents[2]


def press(*_: object, **__: object) -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


def test_a_command_that_is_interrupted_while_it_starts_ends_without_a_traceback():
    code = """
import runpy, sys
class Press:
    def find_spec(self, name, *_):
        if name == "registry.cli.program":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
sys.argv = ["sluicegate", "bundle", "list"]
runpy.run_module("registry.cli", run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (Exit.INTERRUPTED, "", "interrupted\n")


def test_an_interrupted_wait_for_a_drain_says_that_it_drains_on(scene, monkeypatch):
    run = scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest, "--json").json["id"]
    assert scene.runner.runners.claim(scene.runner_id).job == UUID(run)
    monkeypatch.setattr(runners, "time", SimpleNamespace(monotonic=time.monotonic, sleep=press))
    ran = scene.command("runner", "drain", "runner-1", "-r", "a new driver", "--wait")
    assert ran.status == Exit.INTERRUPTED
    assert ran.err.endswith("\ninterrupted\n")
    assert "only the waiting ended; it drains on: `sluicegate runner show runner-1` says what for" in ran.err
    assert "`sluicegate runner undrain runner-1` ends it" in ran.err
    assert scene.command.ok("runner", "show", "runner-1", "--json").json["drain"]["reason"] == "a new driver"


def test_an_interrupted_log_says_where_to_go_on_and_gives_a_program_what_came(scene, monkeypatch):
    events = Client.events

    def cut(client, **asked):
        log = events(client, **asked)
        yield next(log)
        yield next(log)
        raise KeyboardInterrupt

    entries = scene.command.ok("evidence", "list", "--json").json["items"]
    assert len(entries) > 2
    with monkeypatch.context() as patched:
        patched.setattr(Client, "events", cut)
        program = scene.command("evidence", "follow", "--timeout", "60", "--json")
        person = scene.command("evidence", "follow")
    assert (program.status, person.status) == (Exit.INTERRUPTED, Exit.INTERRUPTED)
    assert [one["id"] for one in program.json["items"]] == [one["id"] for one in entries[:2]]
    assert len(person.out.splitlines()) == 2
    assert f"go on from here: sluicegate evidence follow --after {program.json['cursor']}" in person.err
    rest = scene.command.ok("evidence", "follow", "--after", program.json["cursor"], "--timeout", "2", "--json").json
    assert [one["id"] for one in rest["items"]] == [one["id"] for one in entries[2:]]


def test_an_interrupted_wait_for_a_run_says_how_to_come_back_and_how_to_end_it(scene, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Client, "events", press)
        waited = scene.command("gate", "run", scene.bundle.digest, "-p", scene.policy.digest, "--wait")
    assert waited.status == Exit.INTERRUPTED
    identity = waited.err.partition("sluicegate gate watch ")[2].split()[0]
    assert f"end it: sluicegate gate cancel {identity} --reason …" in waited.err
    missing = scene.command("gate", "cancel", identity)
    assert (missing.status, "--reason" in missing.err) == (Exit.INVALID, True)
    ended = scene.command.ok("gate", "cancel", identity[:18], "-r", "a typing error", "--json").json
    assert (ended["state"], ended["outcome"]) == ("cancelled", "undecided")
    assert f"run {identity}: cancelled" in scene.command.ok("gate", "cancel", identity, "-r", "again").out
    watched = scene.command("gate", "watch", identity)
    assert watched.status == Exit.UNDECIDED
    assert "a typing error" in watched.out + watched.err
    over = scene.command("gate", "watch", identity, "--json")
    assert (over.status, "a typing error" in over.json["problem"]) == (Exit.UNDECIDED, True)


def test_an_interrupted_export_leaves_no_file_and_says_so(scene, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Client, "me", press)  # the archive has been written, and has not its name yet
        ran = scene.command("evidence", "export", tmp_path / "evidence.jsonl")
    assert (ran.status, list(tmp_path.glob("*evidence*"))) == (Exit.INTERRUPTED, [])
    assert f"{tmp_path / 'evidence.jsonl'} was not written" in ran.err
    assert scene.command.ok("evidence", "export", tmp_path / "evidence.jsonl").out
