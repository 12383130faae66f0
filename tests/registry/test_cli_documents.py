import io
import json
import os
from pathlib import Path

import pytest

from gates.arrivals import make_suite
from registry.cli.documents import read_file
from schemas.policy import Policy
from schemas.problems import InvalidDocument, Usage
from schemas.suite import GoldenSuite, LoadSpec, LoadSuite
from tests.support.factories import canary_body, golden_body, load_body, load_spec_body, policy_body

SPEC = load_spec_body()


@pytest.fixture
def manager(command, stack):
    command.be("manager", stack)
    return command


@pytest.fixture
def write(tmp_path):
    def written(name: str, value: object):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return written


def errors(ran) -> dict[str, str]:
    assert ran.status == 2, ran
    return {error["pointer"]: error["detail"] for error in ran.json["errors"]}


# ------------------------------------------------------------------------------------------------- policies


def test_a_policy_is_pushed_once_and_shown(manager, write):
    file = write("policy.json", policy_body())
    first = manager.ok("policy", "push", file, "--json").json
    again = manager.ok("policy", "push", file, "--json").json

    digest = Policy.model_validate(policy_body()).digest
    assert first == {"digest": digest, "name": "quick", "is_new": True}
    assert again == first | {"is_new": False}
    assert manager.ok("policy", "show", digest[7:20], "--json").json["document"] == policy_body()
    assert manager.ok("policy", "show", file, "--json").json["digest"] == digest
    shown = manager.ok("policy", "show", digest).out
    for expected in (digest, "compatibility", "boot 1 min", "10 %", "error ratio above 0.05"):
        assert expected in shown
    assert [one["digest"] for one in manager.ok("policy", "show", "--json").json["items"]] == [digest]
    assert digest in manager.ok("policy", "show").out


def test_a_policy_in_toml_is_the_same_policy(manager, write):
    text = """
    schema = "sluicegate.dev/policy/v1"
    name = "quick"
    description = "For tests: loose limits, small samples."
    evidence_seconds = "86400"
    approval = {required = 0}
    [[gates]]
    gate = "integrity"
    [[gates]]
    gate = "compatibility"
    boot_seconds = "60"
    answer_seconds = "10"
    [canary]
    soak_seconds = "2"
    dead_man_seconds = "60"
    drain_seconds = "5"
    stop_conditions = [{metric = "error_ratio", max_ratio = "0.05"}]
    [[canary.steps]]
    weight_bp = 1000
    hold_seconds = "1"
    min_requests = 59
    max_seconds = "120"
    [[canary.steps]]
    weight_bp = 10000
    hold_seconds = "1"
    min_requests = 59
    max_seconds = "120"
    """
    pushed = manager.ok("policy", "push", write("policy.toml", text), "--json").json
    assert pushed["digest"] == Policy.model_validate(policy_body()).digest


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"nope": 1}, "/nope", "is no field here; the fields are schema, name"),
        ({"gates": []}, "/gates", "has no items, and needs at least 1"),
        ({"gates": [{"gate": "structurd"}]}, "/gates/0/gate", "did you mean structured?"),
        ({"gates": [{"gate": "integrity", "nope": 1}]}, "/gates/0/nope", "is no field here; the fields are gate"),
        ({"gates": [{"gate": "integrity"}]}, "/gates", "compatibility may not be left out; every other gate may"),
        ({"canary": canary_body((5000, 1000, 10_000))}, "/canary/steps", "must rise strictly"),
        ({"canary": canary_body((5000,))}, "/canary/steps", "end at 10000"),
        ({"canary": canary_body(stop_conditions=[])}, "/canary/stop_conditions", "needs at least 1"),
        ({"approval": {"required": -1}}, "/approval/required", "is -1, and has to be at least 0"),
        ({"evidence_seconds": 10.5}, "/evidence_seconds", "is 10.5, and must be a decimal number in a string"),
    ],
)
def test_a_policy_that_is_wrong_is_refused_here_with_its_place(command, write, changes, place, said):
    command.use("http://127.0.0.1:1", "token")  # nobody is asked
    found = errors(command("policy", "push", write("policy.json", policy_body() | changes), "--json"))
    assert said in found[place]


def test_a_policy_that_could_never_decide_is_refused_here(manager, write):
    step = {"weight_bp": 10_000, "hold_seconds": "1", "min_requests": 3, "max_seconds": "9"}
    weak = policy_body(canary=canary_body(steps=[step]))
    ran = manager("policy", "push", write("policy.json", weak), "--json")
    assert ran.json["title"] == "Policy too weak"
    assert set(errors(ran)) == {"/canary/steps/0/min_requests"}
    golden = {"gate": "golden", "suite": "sha256:" + "a" * 64, "margin_nat": "0.1", "min_prompts": 1}
    unknown = write("policy.json", policy_body(gates=[*policy_body()["gates"], golden]))
    ran = manager("policy", "push", unknown, "--json")
    assert (ran.status, ran.json["title"], ran.json["suites"]) == (2, "Suite missing", [golden["suite"]])
    assert set(errors(ran)) == {"/gates/2/suite"}
    assert "push it first with `sluicegate suite push FILE`" in manager("policy", "push", unknown).err
    assert manager.ok("policy", "show", "--json").json == {"items": []}


def test_an_engineer_may_not_push_a_policy(command, stack, write):
    command.be("engineer", stack)
    ran = command("policy", "push", write("policy.json", policy_body()))
    assert ran.status == 4
    assert "Not permitted" in ran.err


# --------------------------------------------------------------------------------------------------- suites


def test_suites_of_both_kinds_are_pushed_and_shown(manager, write):
    golden = manager.ok("suite", "push", write("golden.json", golden_body()), "--json").json
    load = manager.ok("suite", "push", write("load.json", load_body()), "--json").json

    assert golden["digest"] == GoldenSuite.model_validate(golden_body()).digest
    assert load["digest"] == LoadSuite.model_validate(load_body()).digest
    assert "p0" in manager.ok("suite", "show", golden["digest"]).out
    assert "60 requests in 0.6 s" in manager.ok("suite", "show", load["digest"][7:15]).out
    assert len(manager.ok("suite", "show", "--json").json["items"]) == 2


def test_a_load_spec_is_drawn_into_the_same_plan_every_time(manager, write):
    file = write("spec.json", SPEC)
    first = manager.ok("suite", "push", file, "--json").json
    again = manager.ok("suite", "push", file, "--json").json
    assert again == first | {"is_new": False}
    assert first["digest"] == make_suite(LoadSpec.model_validate(SPEC)).digest
    assert manager.ok("suite", "show", file, "--json").json["digest"] == first["digest"]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (golden_body() | {"nope": 1}, "/nope"),
        (golden_body() | {"prompts": []}, "/prompts"),
        (load_body() | {"plan": [{"at_us": -1, "prompt": "p0"}]}, "/plan/0/at_us"),
        ({"schema": "sluicegate.dev/suite/none/v1"}, "/schema"),
        (SPEC | {"nope": 1}, "/nope"),
        (SPEC | {"requests": 0}, "/requests"),
    ],
)
def test_a_suite_that_is_wrong_is_refused_here_with_its_place(command, write, value, place):
    command.use("http://127.0.0.1:1", "token")
    assert place in errors(command("suite", "push", write("suite.json", value), "--json"))


@pytest.mark.parametrize("value", [{"rate": 10, "seed": 1}, {"name": "ping", "prompts": []}, {}])
def test_a_document_that_is_neither_suite_nor_spec_is_told_what_makes_one(command, write, value):
    command.use("http://127.0.0.1:1", "token")
    ran = command("suite", "push", write("suite.json", value))
    assert ran.status == 2
    assert 'neither a suite, which has "schema", nor a load spec, which has rate_per_second, requests' in ran.err


def test_a_document_of_another_kind_is_told_what_takes_it(command, write):
    policy = write("p.json", {"schema": "sluicegate.dev/policy/v1", "name": "p"})
    ran = command("suite", "push", policy)
    assert ran.status == 2
    assert f"{policy} is a policy, not a suite; register it with `sluicegate policy push {policy}`" in ran.err
    ran = command("policy", "push", write("s.json", {"schema": "sluicegate.dev/suite/golden/v1", "name": "s"}))
    assert "is a suite, not a policy; register it with `sluicegate suite push" in ran.err


def test_a_spec_is_told_each_key_that_it_lacks(command, write):
    command.use("http://127.0.0.1:1", "token")
    found = errors(command("suite", "push", write("spec.json", {"rate": 10, "requests": 64, "name": "x"}), "--json"))
    assert {"/rate", "/rate_per_second", "/seed", "/prompts"} <= found.keys()


def test_a_spec_that_draws_no_plan_is_refused(command, write):
    command.use("http://127.0.0.1:1", "token")
    ran = command("suite", "push", write("spec.json", SPEC | {"rate_per_second": "0"}))
    assert ran.status == 2
    assert "rate_per_second" in ran.err


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "", "is not JSON"),
        ("a.json", '{"a": NaN}', "NaN"),
        ("a.toml", "a = ", "is not TOML"),
        ("a.toml", "a = 2026-11-29", "canonical JSON"),
        ("a.toml", "a = nan", "canonical JSON"),
        ("a.toml", "a = 1\na = 2", "is not TOML"),
    ],
)
def test_a_file_that_is_no_document_is_refused(write, name, text, said):
    with pytest.raises(InvalidDocument, match=said):
        read_file(write(name, text))


@pytest.mark.timeout(20)
def test_a_pipe_or_a_device_is_refused_at_once_and_standard_input_is_read(command, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.json")
    for path, kind in ((tmp_path / "pipe.json", "a pipe"), (Path("/dev/zero"), "a device")):
        for arguments in (
            ("policy", "push", path),
            ("suite", "push", path),
            ("bundle", "create", tmp_path, "-f", path),
            ("evidence", "verify", "--archive", path),
            ("evidence", "verify", "--archive", tmp_path / "pipe.json", "--key", path),
        ):
            ran = command(*arguments)
            assert ran.status == 2
            assert f"{path}: is {kind}, no regular file" in ran.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"name": "x"}')))
    ran = command("policy", "push", "-")
    assert (ran.status, "/gates: is required" in ran.err) == (2, True)


def test_a_name_in_another_encoding_is_shown_and_is_no_defect(command, tmp_path):
    name = tmp_path / os.fsdecode(b"caf\xe9.json")
    (tmp_path / "d").mkdir()
    name.write_text("{}")
    (tmp_path / "d" / os.fsdecode(b"caf\xe9.gguf")).write_text("x")
    ran = command("policy", "push", name, "--json")
    assert (ran.status, "caf\ufffd" in ran.json["detail"]) == (2, True)
    ran = command("bundle", "create", tmp_path / "d", "--name", "x", "--json")
    assert (ran.status, "is no text" in ran.json["errors"][0]["detail"]) == (2, True)
    assert "caf\\udce9.gguf: has" in command("bundle", "create", tmp_path / "d", "--name", "x").err


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    with pytest.raises(Usage, match="No such file"):
        read_file(tmp_path / "missing.json")
    with pytest.raises(Usage, match="is a directory"):
        read_file(tmp_path)
    for suffix in ("json", "toml"):
        path = tmp_path / f"large.{suffix}"
        with path.open("wb") as file:
            file.truncate(100 * 1024 * 1024)
        with pytest.raises(InvalidDocument, match="is larger than"):
            read_file(path)
    (tmp_path / "latin.toml").write_bytes(b'a = "\xff"')
    with pytest.raises(InvalidDocument, match="is not UTF-8"):
        read_file(tmp_path / "latin.toml")
