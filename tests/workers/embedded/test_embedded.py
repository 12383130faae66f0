import json
import os
import signal
import stat

import httpx
import pytest

from tests.support.embedded import Stack, beneath, runs, until
from workers.embedded.__main__ import main

PARTS = {"postgres", "valkey", "api", "control", "beat", "envoy", "runner"}


def answers(gateway_url):
    """Tell whether Envoy serves: it knows no target yet, and says so."""
    try:
        return httpx.get(f"{gateway_url}/chat@prod/v1/models", trust_env=False).status_code == 404
    except httpx.TransportError:
        return False


@pytest.mark.timeout(180)
def test_a_stack_survives_kills_and_comes_back_on_the_same_data(tmp_path):
    data = tmp_path / "my data"  # a space, as in many people's paths
    stack = Stack(data)
    first = stack.wait_ready()
    assert set(stack.running()) == PARTS
    assert stack.get("/readyz").status_code == 200
    assert stack.get("/v1/me").json() == {"project": "default", "name": "admin", "role": "admin"}
    assert answers(first["gateway_url"])
    assert json.loads((data / "config.json").read_text()) == {"url": first["url"], "token": first["token"]}
    assert stat.S_IMODE((data / "config.json").stat().st_mode) == 0o600

    # A second one on the same data is refused and told who holds it.
    second = Stack(data)
    assert f"in use by the process {stack.process.pid}" in second.complaint()
    assert second.process.returncode == 4

    # A part that is killed comes back, and the others find it again.
    killed = stack.running()["envoy"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: stack.running().get("envoy", killed) != killed and answers(first["gateway_url"]))

    # The supervisor itself is killed: what it ran ends, now or at the next start, which finds everything as it was.
    former = stack.running()
    stack.kill()
    stack = Stack(data)
    again = stack.wait_ready()
    assert {**again, "pid": 0, "ready_seconds": 0} == {**first, "pid": 0, "ready_seconds": 0}
    assert not any(runs(pid) for pid in former.values())
    assert stack.get("/v1/me").status_code == 200

    assert stack.stop() == 0
    assert beneath(data) == []
    assert not (data / "processes.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--port", "0"], ["--port", "x"], ["--runner-class", "Two Words"], ["--wait-seconds", "-1"], ["--unknown"]],
)
def test_arguments_that_make_no_sense_are_a_matter_of_usage(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path / "data"), *arguments])
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_place_that_cannot_be_used_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "other").write_text("x")
    assert main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sluicegate: ")
    assert said.count("\n") == 1
