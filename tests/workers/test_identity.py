"""What the real engine says when it was booted otherwise than the bundle says: each difference is found by its name."""

import subprocess
import sys
from dataclasses import replace

import pytest

from schemas.common import sha256_digest
from schemas.problems import EngineFailed
from schemas.result import Severity
from schemas.runner import Agreement, EngineIdentity, ReplicaState
from tests.support import chain
from workers.engines.base import Launch
from workers.engines.llamacpp import LLAMACPP
from workers.identity import Booted, hold
from workers.launchers.process import ProcessLauncher
from workers.serving import Replica

SAMPLING = {"temperature": "0.7", "top_p": "0.9", "top_k": 20, "min_p": "0.1", "repetition_penalty": "1.1"}
RUNTIME = {"context_tokens": 512, "max_sequences": 2, "sampling": SAMPLING}
FAILED = "identity_differs: "


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    """One engine, booted as its bundle says, for all that is said otherwise."""
    place = tmp_path_factory.mktemp("identity")
    root = chain.write_bundle_directory(place / "bundle")
    bundle = chain.describe(root, environment=LLAMACPP.identity().digest, runtime=RUNTIME)
    launch = Launch(root=root, port_file=place / "run" / "port.json")
    replica = Replica(bundle, launch, workdir=place / "run", launcher=ProcessLauncher())
    replica.start()
    try:
        ready = replica.wait_ready(30)
        argv = LLAMACPP.command(bundle, launch).argv
        one = Booted(bundle, root, argv, replica.process_id(), LLAMACPP.identity(), False, False)
        yield one, replica, ready
    finally:
        replica.stop(grace_seconds=0.0)


def held(booted, **changes):
    """Hold the engine to a bundle that says something else."""
    one, replica, ready = booted
    document = one.bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name in set(changes) & set(document):
        document[name] = {**document[name], **changes.pop(name)}
    bundle = type(one.bundle).model_validate(document)
    launch = Launch(root=one.root, port_file=replica.workdir / "port.json")
    told = {"bundle": bundle, "argv": LLAMACPP.command(bundle, launch).argv} | changes
    return hold(replace(one, **told), replica.base_url, ready.identity)[1]


def test_an_engine_that_was_booted_as_its_bundle_says_differs_in_nothing(booted):
    one, _, ready = booted
    assert ready.findings == ()
    assert {row.outcome for row in ready.compared} == {Agreement.EQUAL}
    assert [row.item for row in ready.compared] == [
        *("version", "environment", "arguments", "model", "model_path", "adapters", "parameters", "context_tokens"),
        *("slots", "kv_tokens", "template", "vocabulary", "bos_token", "eos_token"),
        *(f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
    ]
    template = next(row for row in ready.compared if row.item == "template")
    assert template.expected == template.found == sha256_digest(chain.TEMPLATE.encode())
    assert ready.identity.arguments == list(one.argv)
    assert ready.identity.version == one.bundle.engine.version


OTHERWISE = [
    ("engine-version-differs", "2026.10.11549", "1.0", {"engine": {"version": "1.0"}}),
    ("context-differs", "512", "1024", {"runtime": {"context_tokens": 1024}}),
    ("context-differs", "512", "256", {"runtime": {"context_tokens": 256}}),
    ("kv-tokens-short", "1024", "at least 2048", {"runtime": {"context_tokens": 2048}}),
    ("kv-tokens-below-plan", "1024", "at least 1536", {"runtime": {"max_sequences": 3}}),
    ("slots-differ", "2", "3", {"runtime": {"max_sequences": 3}}),
    ("sampling-differs", "0.7", "1.5", {"runtime": {"sampling": SAMPLING | {"temperature": "1.5"}}}),
    ("sampling-differs", "0.9", "0.5", {"runtime": {"sampling": SAMPLING | {"top_p": "0.5"}}}),
    ("sampling-differs", "20", "40", {"runtime": {"sampling": SAMPLING | {"top_k": 40}}}),
    ("sampling-differs", "0.1", "0", {"runtime": {"sampling": SAMPLING | {"min_p": "0"}}}),
    ("sampling-differs", "1.1", "1", {"runtime": {"sampling": SAMPLING | {"repetition_penalty": "1"}}}),
]


@pytest.mark.parametrize(("code", "found", "expected", "sections"), OTHERWISE)
def test_a_bundle_that_says_otherwise_is_found_by_name_with_both_values(booted, code, found, expected, sections):
    told = held(booted, **sections)
    one = next(each for each in told.findings if each.code == code)
    assert (one.found, one.expected) == (found, expected)
    assert found in one.message
    assert expected.removeprefix("at least ") in one.message
    assert one.advice
    warns = code in {"slots-differ", "kv-tokens-below-plan"}
    assert one.severity is (Severity.WARN if warns else Severity.BLOCK)


def test_another_model_is_found_by_its_name(booted):
    (one,) = [each for each in held(booted, serving={"served_name": "other"}).blocking if each.code == "model-differs"]
    assert (one.found, one.expected) == ("chain", "other")


def test_another_environment_is_found_by_its_digest(booted):
    installed = replace(booted[0].installed, digest="sha256:" + "1" * 64)
    (one,) = held(booted, installed=installed).blocking
    assert (one.code, one.found, one.expected) == ("environment-differs", installed.digest, LLAMACPP.identity().digest)


def test_other_arguments_are_found_in_the_process_itself(booted):
    (one,) = [
        each
        for each in held(booted, engine={"arguments": ["--threads", "2"]}).blocking
        if each.code == "arguments-differ"
    ]
    assert one.found.startswith("--threads 1 --poll 0 --no-warmup")
    assert one.expected.startswith("--threads 2")


# Writes a title where its command line was, and zeros over the rest, as setproctitle does.
TITLED = """
import ctypes, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[45]), int(fields[46])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, b"engine::server", 14)
print("titled", flush=True)
time.sleep(60)
"""


def test_a_process_that_gave_itself_a_title_reports_no_arguments(booted):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    single = subprocess.Popen(["sleep"], executable=sys.executable, stdin=subprocess.PIPE)
    titled = subprocess.Popen([sys.executable, "-c", TITLED, "--threads", "1"], stdout=subprocess.PIPE)
    try:
        assert titled.stdout.readline() == b"titled\n"
        for process in (single, titled):
            rows = {row.item: row.outcome for row in held(booted, pid=process.pid).rows}
            assert rows["arguments"] is Agreement.NOT_REPORTED
        assert [one.code for one in held(booted, pid=other.pid).blocking] == ["arguments-differ"]
    finally:
        for process in (other, single, titled):
            process.kill()
            process.wait()
        single.stdin.close()
        titled.stdout.close()


@pytest.mark.parametrize(
    ("codes", "write"),
    [
        ({"template-differs"}, {"template": chain.SELECTING_TEMPLATE}),
        ({"weights-differ"}, {"headless": True}),
    ],
)
def test_other_files_than_those_that_were_read_are_found(booted, tmp_path, codes, write):
    one, _, _ = booted
    root = chain.write_bundle_directory(tmp_path / "bundle", **write)
    other = chain.describe(root, environment=one.bundle.engine.environment, runtime=RUNTIME)
    found = held(booted, bundle=other, root=root, argv=one.argv)
    assert {each.code for each in found.blocking} == codes
    launch = Launch(root=root, port_file=tmp_path / "port.json")
    elsewhere = held(booted, bundle=other, root=root, argv=LLAMACPP.command(other, launch).argv)
    assert {each.code for each in elsewhere.blocking} == {*codes, "model-path-differs", "arguments-differ"}


def test_another_tokenizer_is_found_by_its_own_words(booted, tmp_path, monkeypatch):
    monkeypatch.setattr(chain, "SPECIAL_TOKENS", ("<pad>", "<begin>", "</s>", "<|im_start|>", "<end>"))
    root = chain.write_bundle_directory(tmp_path / "bundle")
    one, _, _ = booted
    other = chain.describe(root, environment=one.bundle.engine.environment, runtime=RUNTIME)
    found = held(booted, bundle=other, root=root, argv=one.argv)
    assert [(each.code, each.found, each.expected) for each in found.blocking] == [
        ("tokenizer-differs", "<s>", "<begin>"),
        ("tokenizer-differs", "<|im_end|>", "<end>"),
    ]


def test_an_engine_that_does_not_answer_any_more_says_nothing(booted):
    one, _, _ = booted
    identity = EngineIdentity(name="llamacpp", version="1", arguments=[], model_ids=[], context_tokens=0)
    found = hold(replace(one, pid=None, installed=None), "http://127.0.0.1:1", identity)[1]
    assert found.findings == ()
    assert {row.outcome for row in found.rows} == {Agreement.NOT_REPORTED}


def as_other(booted, **changes):
    """Return a replica of a bundle that says otherwise, and one that takes up the running engine."""
    one, replica, _ = booted
    runtime = one.bundle.runtime.model_copy(update=changes)
    bundle = one.bundle.model_copy(update={"runtime": runtime})
    seen = []
    launch = Launch(root=one.root, port_file=replica.workdir / "port.json")
    other = Replica(
        bundle,
        launch,
        workdir=replica.workdir,
        launcher=ProcessLauncher(),
        on_transition=lambda state, cause: seen.append((state, cause)),
    )
    return other, replica.launched, seen


def test_one_that_is_taken_up_serves_on_and_says_in_what_it_differs(booted):
    other, launched, seen = as_other(booted, context_tokens=1024)
    assert other.adopt(launched.pid, launched.start_time, launched.boot_id, launched.port)
    ready = other.wait_ready(10)
    assert {one.code for one in ready.findings} == {"context-differs", "kv-tokens-below-plan"}
    state, cause = seen[-1]
    assert state is ReplicaState.READY
    assert "context of one request is 512" in cause
    assert "the bundle says 1024" in cause


@pytest.mark.parametrize("end", ["\n", "\r\n\r\n"])
@pytest.mark.parametrize("place", ["file", "weights"])
def test_a_template_agrees_however_its_lines_end(tmp_path, place, end):
    template = chain.TEMPLATE.replace("\n", end) + end
    root = chain.write_bundle_directory(tmp_path / "bundle", template=None)
    if place == "weights":
        chain.write_chain(root / "model.gguf", template=template)
    else:
        (root / "chat_template.jinja").write_bytes(template.encode())
    bundle = chain.describe(root, environment=LLAMACPP.identity().digest)
    launch = Launch(root=root, port_file=tmp_path / "run" / "port.json")
    replica = Replica(bundle, launch, workdir=tmp_path / "run", launcher=ProcessLauncher())
    replica.start()
    try:
        ready = replica.wait_ready(30)
    finally:
        replica.stop(grace_seconds=0.0)
    assert [row.outcome for row in ready.compared if row.item == "template"] == [Agreement.EQUAL]


def test_a_boot_that_differs_fails_with_its_findings_and_leaves_no_engine(tmp_path):
    root = chain.write_bundle_directory(tmp_path / "bundle")
    bundle = chain.describe(root, environment=LLAMACPP.identity().digest)
    bundle = bundle.model_copy(update={"engine": bundle.engine.model_copy(update={"version": "1.0"})})
    launch = Launch(root=root, port_file=tmp_path / "run" / "port.json")
    replica = Replica(bundle, launch, workdir=tmp_path / "run", launcher=ProcessLauncher())
    replica.start()
    try:
        with pytest.raises(EngineFailed) as caught:
            replica.wait_ready(30)
    finally:
        replica.stop(grace_seconds=0.0)
    assert caught.value.detail.startswith(FAILED + "The engine's version is 2026.10.11549")
    (one,) = caught.value.members["findings"]
    assert (one["code"], one["found"], one["expected"]) == ("engine-version-differs", "2026.10.11549", "1.0")
    assert (replica.state, replica.process_id()) == (ReplicaState.FAILED, None)
