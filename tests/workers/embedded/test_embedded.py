import contextlib
import json
import os
import signal
import stat

import httpx
import pytest

from gates.plain import NO_AUTHORITY
from registry.client import Client
from schemas.api import ReleaseCreate, TargetCreate
from tests.support import chain, factories
from tests.support.embedded import Stack, beneath, runs, until
from workers.embedded.__main__ import data_directory, main
from workers.engines.llamacpp import LLAMACPP

PARTS = {"postgres", "valkey", "api", "control", "beat", "envoy", "runner"}


CANARY = {
    "steps": [{"weight_bp": 10_000, "hold_seconds": "0.2", "min_requests": 29, "max_seconds": "60"}],
    "stop_conditions": [{"metric": "error_ratio", "max_ratio": "0.1"}],
    "soak_seconds": "0.5",
    "dead_man_seconds": "60",
    "drain_seconds": "2",
}


def release(facts, folder):
    """Take CHAIN live through the API alone, with the requests that its canary needs."""
    with Client(facts["url"], facts["token"]) as client:
        directory = chain.write_bundle_directory(folder)
        bundle = chain.describe(directory, environment=LLAMACPP.identity().digest)
        for file in bundle.files:
            client.blobs.upload(file.sha256, directory / file.path)
        client.bundles.create(bundle)
        policy = client.policies.create(json.dumps(factories.policy_body(canary=CANARY)).encode())
        client.targets.create(TargetCreate(name="chat@prod", runner_class="cpu", gateway="local"))
        made = client.releases.create(ReleaseCreate(target="chat@prod", bundle=bundle.digest, policy=policy.digest))

        def is_promoted():
            ask(facts)
            return client.releases.get(made.id).phase == "promoted"

        until(is_promoted, seconds=90)


def ask(facts):
    """Return the answer of the target to CHAIN's prompt, or the status without one."""
    body = {"model": "chain", "messages": chain.PROMPT, "temperature": 0, "max_tokens": 8}
    url = f"{facts['gateway_url']}/chat@prod/v1/chat/completions"
    try:
        answer = httpx.post(url, json=body, trust_env=False, timeout=10, verify=NO_AUTHORITY)
    except httpx.TransportError:
        return None
    return answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.status_code


@pytest.mark.timeout(300)
def test_a_stack_survives_kills_and_serves_again_on_the_same_data(tmp_path):
    data = tmp_path / "my data"  # a space, as in many people's paths
    stack = Stack(data)
    first = stack.wait_ready()
    assert set(stack.running()) == PARTS
    assert stack.get("/readyz").status_code == 200
    me = {"project": "default", "name": "admin", "role": "admin", "targets": None, "expires_at": None}
    assert stack.get("/v1/me").json() == me
    assert ask(first) == 404  # of Envoy, which knows no target yet
    assert json.loads((data / "config.json").read_text()) == {"url": first["url"], "token": first["token"]}
    assert stat.S_IMODE((data / "config.json").stat().st_mode) == 0o600

    # A second one on the same data is refused and told who holds it.
    second = Stack(data)
    assert f"in use by the process {stack.process.pid}" in second.complaint()
    assert second.process.returncode == 4

    release(first, tmp_path / "chain")
    assert ask(first) == chain.ANSWER

    # A part that is killed comes back.
    killed = stack.running()["envoy"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: stack.running().get("envoy", killed) != killed and ask(first) == chain.ANSWER)

    # The supervisor itself is killed: what it ran ends, now or at the next start, but for the engine.
    former = stack.running()
    stack.kill()
    stack = Stack(data)
    again = stack.wait_ready()
    assert {**again, "pid": 0, "ready_seconds": 0} == {**first, "pid": 0, "ready_seconds": 0}
    assert not any(runs(pid) for pid in former.values())
    until(lambda: ask(again) == chain.ANSWER, seconds=60)

    # Stopped as it should be, nothing is left, and the next start boots the engine anew.
    assert stack.stop() == 0
    assert beneath(data) == []
    assert not (data / "processes.json").exists()
    # A shell lets what a script starts in the background ignore SIGINT; who sends it means it all the same.
    stack = Stack(data, in_background=True)
    stack.wait_ready()
    until(lambda: ask(again) == chain.ANSWER, seconds=60)
    assert stack.stop(signal.SIGINT) == 0
    assert beneath(data) == []


def test_a_stack_whose_lines_nobody_reads_starts_its_parts_again_and_stops(tmp_path):
    """As in a terminal that was stopped, or behind a pipe whose reader stands still."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    stack = Stack(tmp_path / "data", "--no-runner", "--drain-seconds", "1", stderr=writing)
    os.close(writing)
    try:
        stack.wait_ready()
        control = stack.running()["control"]
        os.kill(control, signal.SIGKILL)
        until(lambda: stack.running().get("control", control) != control)
    finally:
        status = stack.stop()
        os.close(reading)
    assert status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "0"],
        ["--port", "x"],
        ["--runner-class", "Two Words"],
        ["--wait-seconds", "-1"],
        ["--drain-seconds", "nan"],
        ["--unknown"],
        ["x"],
    ],
)
def test_arguments_that_make_no_sense_are_a_matter_of_usage_as_of_every_command(arguments, tmp_path, capsys):
    assert main(["--data", str(tmp_path / "data"), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: Usage: ")
    assert said.err.endswith("; see `sluicegate up --help`\n")
    assert said.err.count("\n") == 1
    assert main(["--data", str(tmp_path / "data"), "--json", *arguments]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["type"] == "/problems/usage"
    assert said.err == ""
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("asked", "xdg", "found"),
    [
        (None, "/srv/share", "/srv/share/sluicegate"),
        (None, "relative", "/home/maria/.local/share/sluicegate"),
        (None, None, "/home/maria/.local/share/sluicegate"),
        ("~/stack", "/srv/share", "/home/maria/stack"),
        ("/srv/stack/../other", None, "/srv/other"),
    ],
)
def test_the_data_lie_where_they_are_asked_for_or_in_the_home_of_the_person(asked, xdg, found, monkeypatch):
    monkeypatch.setenv("HOME", "/home/maria")
    monkeypatch.setenv("XDG_DATA_HOME", xdg) if xdg else monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert str(data_directory(asked)) == found


def test_a_place_that_cannot_be_used_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "other").write_text("x")
    assert main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Usage: ")
    assert said.count("\n") == 1
    assert main(["--data", str(tmp_path), "--json"]) == 2
    assert "holds something else" in json.loads(capsys.readouterr().out)["detail"]
