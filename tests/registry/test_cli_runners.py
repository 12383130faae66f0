"""Runners at the command line: what they are, what of them is reserved, and what they do."""

from uuid import UUID

from schemas.runner import RunnerRegistration
from tests.support.scene import FINGERPRINT


def test_runners_are_listed_with_their_hardware(scene):
    (runner,) = scene.command.ok("runner", "list", "--alive", "--json").json["items"]
    assert (runner["name"], runner["runner_class"], runner["is_alive"]) == ("runner-1", "cpu", True)
    assert "4 × Test CPU, 8.6 GB" in scene.command.ok("runner", "list").out
    cards = [{"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}] * 8
    large = {**FINGERPRINT.model_dump(), "accelerators": cards, "driver": "550.54", "cuda": "12.4"}
    body = {"name": "gpu-1", "runner_class": "h100", "engines": [], "boot_id": "b", "fingerprint": large}
    scene.runner.runners.register(RunnerRegistration.model_validate(body))
    (found,) = scene.command.ok("runner", "list", "--class", "h100", "--json").json["items"]
    assert (found["name"], found["reserved"]) == ("gpu-1", {"accelerators": [], "memory_bytes": 0})
    told = scene.command.ok("runner", "list", "--class", "h100").out
    assert "8 × NVIDIA H100 80GB HBM3 85.5 GB, 4 × Test CPU" in told
    assert "0 of 8" in told
    assert "550.54, CUDA 12.4" in scene.command.ok("runner", "show", "gpu-1").out
    assert "no runner of class tpu of project default" in scene.command("runner", "list", "--class", "tpu").err


def test_a_runner_is_shown_by_its_name_or_its_id_with_what_it_does(scene):
    words = [scene.bundle.digest, "--policy", scene.policy.digest, "--runner-class", "cpu"]
    held = scene.command.ok("gate", "run", *words, "--json").json
    assert scene.runner.runners.claim(scene.runner_id).job == UUID(held["id"])
    shown = scene.command.ok("runner", "show", "runner-1", "--json").json
    assert shown == scene.command.ok("runner", "show", shown["id"], "--json").json
    assert (shown["name"], shown["is_alive"]) == ("runner-1", True)
    assert shown["registered_at"] <= shown["last_seen_at"]
    told = scene.command.ok("runner", "show", "runner-1").out
    assert "4 × Test CPU, 8.6 GB" in told
    assert shown["jobs"] == [one["id"] for one in shown["runs"]] == [held["id"]]
    assert held["id"][:8] in told
    ran = scene.command("runner", "show", "nobody")
    assert ran.status == 2
    assert "there is no runner nobody" in ran.err


def test_a_program_reads_the_same_of_a_runner_however_it_drains_it(scene):
    shown = scene.command.ok("runner", "show", "runner-1", "--json").json
    drain = ["runner", "drain", "runner-1", "-r", "a new driver", "--json"]
    at_once, waited = scene.command.ok(*drain).json, scene.command.ok(*drain, "--wait").json
    again = scene.command.ok("runner", "undrain", "runner-1", "-r", "it is in", "--json").json
    assert list(at_once) == list(waited) == list(again) == list(shown)
    assert (at_once["drain"]["reason"], waited["drain"]["waits_for"], again["drain"]) == ("a new driver", [], None)
