import hashlib
import json
import os
import pkgutil
import shutil
from pathlib import Path

import pytest

from gates.environment import environment, place_engines
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from tests.support.chain import TEMPLATE, write_bundle_directory, write_chain
from tests.support.headers import safetensors, tensor
from tests.support.opened import opened_under
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.uploads import begin, patch

IDENTIFIED = ("--engine-environment", "sha256:" + "e" * 64, "--engine-version", "1.0")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_bundle_directory(tmp_path_factory.mktemp("written") / "chain")


@pytest.fixture
def directory(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "chain"))


@pytest.fixture
def engineer(command, stack):
    command.be("engineer", stack)
    return command


def test_a_directory_becomes_a_bundle_and_its_bytes_are_there(engineer, directory, stack):
    made = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json

    assert made["is_new"] is True
    assert made["name"] == "chain"
    assert made["files"] == 2
    assert (
        made["bytes"] == made["bytes_read"] == made["bytes_sent"] == sum(p.stat().st_size for p in directory.iterdir())
    )
    shown = engineer.ok("bundle", "show", made["digest"], "--json").json
    bundle = Bundle.model_validate(shown["document"])
    assert bundle.digest == made["digest"]
    for file in bundle.files:
        held = stack.clients["engineer"].get(f"/v1/blobs/{file.sha256}").content
        assert held == (directory / file.path).read_bytes()


def test_what_was_inferred_is_said_with_its_origin_as_validate_says_it(engineer, directory, tmp_path):
    made = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--label", "team=origin", "--json").json
    told = made["inferred"]
    shown = engineer.ok("bundle", "show", made["digest"], "--json").json
    (tmp_path / "bundle.json").write_text(json.dumps(shown["document"]))
    validated = engineer.ok("bundle", "validate", directory, "-f", tmp_path / "bundle.json", "--json").json["inferred"]
    own = {place: one for place, one in told["from"].items() if place.startswith("/bundle/")}
    assert own == {
        "/bundle/name": {"by": "file", "file": "model.gguf", "pointer": "general.name"},
        "/bundle/served_name": {"by": "derived", "pointer": "/bundle/name"},
        "/bundle/licence": {"by": "default"},
        "/bundle/features": {"by": "default"},
        "/bundle/context_tokens": {"by": "derived", "pointer": "/context/derived"},
        "/bundle/max_sequences": {"by": "default"},
        "/bundle/accelerator": {"by": "default"},
    }
    assert (
        told["bundle"]["context_tokens"] == told["context"]["derived"] == shown["document"]["runtime"]["context_tokens"]
    )
    rest = {place: one for place, one in told["from"].items() if place not in own}
    assert validated == {key: one for key, one in told.items() if key != "bundle"} | {"from": rest}
    said = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--name", "other", "--dry-run").out
    for row in (("bundle name", "other", "--name"), ("architecture", "llama", "model.gguf general.architecture")):
        assert any(all(cell in line for cell in row) for line in said.splitlines())


def test_a_folder_that_is_not_there_is_told_alike_by_all_that_read_one(engineer, tmp_path):
    place = tmp_path / "nodir"
    told = {engineer("bundle", act, place).err for act in ("create", "validate", "plan")}
    (said,) = told
    assert f"error: Usage: there is no directory or file of weights {place}; name one, or hf:…" in said
    (tmp_path / "linked").symlink_to(place)
    assert {engineer("bundle", act, place).status for act in ("create", "validate", "plan")} == {2}


def test_a_name_where_a_digest_belongs_is_answered_with_the_digests_that_have_it(engineer, directory):
    made = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--name", "named-one", "--json").json
    ran = engineer("alias", "set", "champion", "named-one", "-r", "the first")
    assert ran.status == 2
    assert "bundle 'named-one' is neither a digest" in ran.err
    assert "it is a name, and a digest says which of those that have it is meant" in ran.err
    assert f"  {made['digest']}: named-one, created " in ran.err
    for command in (["bundle", "show"], ["alias", "set", "champion", "-r", "x"]):
        assert "`sluicegate bundle list` shows all of them" in engineer(*command, "nobody-is-called-so").err
    assert "`sluicegate policy list` shows all of them" in engineer("policy", "show", "nobody").err


@pytest.mark.parametrize("place", ["gates.directory._Readings._remember", "registry.client.uploads.Uploader.upload"])
def test_an_interrupted_bundle_says_what_stands(engineer, directory, monkeypatch, place):
    asked = ("bundle", "create", directory, *IDENTIFIED, "--name", f"cut-{place.rpartition('.')[2].strip('_')}")
    done, real = [], pkgutil.resolve_name(place)

    def cut(*arguments):
        if done:
            raise KeyboardInterrupt  # at the second file
        done.append(real(*arguments))
        return done[0]

    with monkeypatch.context() as patched:
        patched.setattr(place, cut)
        ran = engineer(*asked)
    assert ran.status == 130
    assert "nothing was registered; the same command goes on from here" in ran.err
    assert ran.err.endswith("\ninterrupted\n")
    again = engineer.ok(*asked, "--json").json
    sizes = sum(path.stat().st_size for path in directory.iterdir())
    assert again["is_new"]
    if place.endswith("_remember"):
        assert 0 < again["bytes_read"] < sizes
    else:
        assert (again["bytes_read"], again["bytes_sent"] < sizes) == (0, True)


def test_the_same_directory_twice_is_one_bundle_and_no_byte_is_read_or_sent_again(engineer, directory, tmp_path):
    first = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json
    with opened_under(directory) as opened:
        again = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json

    assert opened == []
    assert again == first | {"is_new": False, "bytes_read": 0, "bytes_sent": 0}
    # On another machine, at another place, at another time: nothing remembered, and still the same.
    elsewhere = Path(shutil.copytree(directory, tmp_path / "another" / "place"))
    for path in elsewhere.iterdir():
        os.utime(path, (1, 1))
    shutil.rmtree(engineer.home / "cache")
    there = engineer.ok("bundle", "create", elsewhere, *IDENTIFIED, "--json").json
    assert there == first | {"is_new": False, "bytes_sent": 0}


def test_what_will_block_at_the_gate_static_is_said_and_the_bundle_is_registered(engineer, directory):
    sound = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json")
    assert "the gate static" not in sound.err
    assert [one for one in sound.json["findings"] if one["severity"] != "info"] == []
    (directory / "chat_template.jinja").write_text("{% for %}")
    for again in range(2):  # nothing that blocks is remembered
        made = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json")
        assert made.json["is_new"] == (not again)
        assert [one["code"] for one in made.json["findings"] if one["severity"] == "block"] == ["template-fails"]
        assert "the gate static will fail: 1 finding blocks (template-fails); bundle validate tells more" in made.err
    tried = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--dry-run", "--json")
    assert "template-fails: chat_template.jinja cannot render a question" in tried.err
    assert "findings" not in tried.json  # it is the document


def test_chat_without_a_template_is_said_at_once(command, tmp_path):
    (tmp_path / "m").mkdir()
    write_chain(tmp_path / "m" / "model.gguf", template=None)
    create = ("bundle", "create", tmp_path / "m", *IDENTIFIED, "--dry-run")
    assert "1 finding blocks (template-missing)" in command.ok(*create).err
    told = tmp_path / "bundle.json"
    told.write_text('{"serving": {"features": ["completions"]}}')
    assert "the gate static" not in command.ok(*create, "-f", told).err


def test_a_command_that_was_cut_goes_on_where_it_stopped(engineer, directory, stack):
    head = b'{"t": {"dtype": "U8", "shape": [40000000], "data_offsets": [0, 40000000]}}'
    raw = len(head).to_bytes(8, "little") + head + bytes(40_000_000)
    (directory / "lora").mkdir()
    (directory / "lora" / "adapter_model.safetensors").write_bytes(raw)
    (directory / "lora" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    client = stack.clients["engineer"]
    patch(client, begin(client, raw)["id"], 0, raw[:39_000_000])

    ran = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json")

    assert ran.json["bytes_sent"] == ran.json["bytes"] - 39_000_000
    assert "39.0 MB were there" in ran.err
    assert client.get(f"/v1/blobs/{sha256_digest(raw)}").content == raw
    assert client.get("/v1/uploads").json()["items"] == []


def test_one_changed_byte_is_another_bundle_and_only_that_file_is_sent(engineer, directory):
    first = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json
    changed = TEMPLATE.replace("assistant", "assistent").encode()
    (directory / "chat_template.jinja").write_bytes(changed)

    second = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json

    assert second["digest"] != first["digest"]
    assert second["bytes_read"] == second["bytes_sent"] == len(changed)
    differing = {name for name in first["components"] if first["components"][name] != second["components"][name]}
    assert differing == {"template"}


def test_the_engine_installed_here_is_named_when_nothing_else_is(engineer, directory):
    made = engineer.ok("bundle", "create", directory, "--json").json
    engine = engineer.ok("bundle", "show", made["digest"], "--json").json["document"]["engine"]
    installed = environment("xllamacpp")
    assert (engine["environment"], engine["version"]) == (installed.digest, installed.version)


def test_launch_arguments_are_taken_word_by_word(engineer, directory):
    words = ("--arg", "--threads", "--arg", "2", "--arg=--parallel", "--arg=2", "--arg", "--ctx-size", "--arg", "1024")
    document = engineer.ok("bundle", "create", directory, *IDENTIFIED, *words, "--dry-run", "--json").json
    assert document["engine"]["arguments"] == ["--threads", "2", "--parallel", "2", "--ctx-size", "1024"]
    assert document["runtime"] == {"context_tokens": 512, "max_sequences": 2}


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_what_files_cannot_tell_is_overlaid(engineer, directory, suffix):
    overlay = directory / f"bundle{suffix}"  # beside the weights, and no part of them
    told = {
        "name": "other",
        "engine": {"version": "9", "environment": "sha256:" + "a" * 64},
        "runtime": {"context_tokens": 256},
        "roles": {"words.txt": "tokenizer"},
    }
    if suffix == ".json":
        overlay.write_text(json.dumps(told))
    else:
        overlay.write_text(
            'name = "other"\n[engine]\nversion = "9"\nenvironment = "sha256:' + "a" * 64 + '"\n'
            '[runtime]\ncontext_tokens = 256\n[roles]\n"words.txt" = "tokenizer"\n'
        )
    (directory / "words.txt").write_text("a b c")

    ran = engineer.ok(
        "bundle", "create", directory, "-f", overlay, "--licence", "MIT", "--dry-run", "--json", "--name", "mine"
    )

    assert f"left out: bundle{suffix}" in ran.err
    document = ran.json
    assert document["name"] == "other"
    assert document["engine"] == {
        "name": "llamacpp",
        "version": "9",
        "environment": "sha256:" + "a" * 64,
        "arguments": [],
    }
    assert document["runtime"] == {"context_tokens": 256, "max_sequences": 4}
    assert document["licence"] == {"identifier": "MIT"}
    assert {file["path"]: file["role"] for file in document["files"]}["words.txt"] == "tokenizer"


def test_a_dry_run_speaks_to_nobody(command, directory):
    command.use("http://127.0.0.1:1", "token")
    document = command.ok("bundle", "create", directory, *IDENTIFIED, "--dry-run", "--json").json
    assert Bundle.model_validate(document).name == "chain"
    assert "chat_template.jinja" in command.ok("bundle", "create", directory, *IDENTIFIED, "--dry-run").out


def refused(command, *arguments: object) -> dict[str, str]:
    """Run a command that must be refused with status 2, and return pointer → what is wrong there."""
    human, told = command(*arguments), command(*arguments, "--json")
    assert (human.status, told.status) == (2, 2), human
    assert human.out == ""
    assert human.err.count("error: ") == 1
    found = {error["pointer"]: error["detail"] for error in told.json.get("errors", [])}
    for pointer, detail in found.items():
        assert (f"  {pointer}: {detail}" if pointer else detail) in human.err
    return found or {"": told.json["detail"]}


def test_bad_input_is_named_and_nothing_is_stored(engineer, directory, tmp_path, stack):
    outside = tmp_path / "secret"
    outside.write_text("secret")
    create = ("bundle", "create", directory, *IDENTIFIED)

    (directory / "link.json").symlink_to(outside)
    assert "symbolic link" in refused(engineer, *create)["link.json"]
    (directory / "link.json").unlink()
    (directory / "run.so").write_text("1")
    (directory / "what.tar").write_text("1")
    os.link(directory / "chat_template.jinja", tmp_path / "another name")
    found = refused(engineer, *create)
    assert set(found) == {"run.so", "what.tar", "chat_template.jinja"}
    assert "--exclude" in found["what.tar"]
    assert "--hard-links" in found["chat_template.jinja"]
    (directory / "run.so").unlink()
    (directory / "what.tar").unlink()
    (tmp_path / "another name").unlink()

    assert "No such file" in refused(engineer, *create, "-f", tmp_path / "missing.json")[""]
    file = tmp_path / "bundle.json"
    for text, pointer, said in (
        ('{"servin": 1}', "/servin", "is no field here; did you mean serving?"),
        ('{"serving": {"nope": 1}}', "/serving/nope", "is no field here; the fields are served_name"),
        ('{"runtime": {"context_tokens": 0}}', "/runtime/context_tokens", "is 0, and has to be at least 1"),
        ('{"runtime": {"sampling": {"temperature": 0.5}}}', "/runtime/sampling/temperature", "decimal"),
        ('{"files": []}', "/files", "what the directory holds"),
        ('{"roles": {"model.gguf": "brain"}}', "/roles/model.gguf", "is none of"),
        ('{"roles": {"missing.gguf": "weights"}}', "missing.gguf", "not in the directory"),
        ('{"roles": {"../model.gguf": "weights"}}', "../model.gguf", "not in the directory"),
        ('{"template": {"file": "../secret"}}', "/template/file", "path must be relative"),
        ('{"template": {"file": "missing.jinja"}}', "/template", "is not among the files"),
        ('{"a": 1, "a": 2}', "", "twice"),
        ("[]", "", "is not an object"),
        ("{", "", "is not JSON"),
    ):
        file.write_text(text)
        found = refused(engineer, *create, "-f", file)
        assert pointer in found, (text, found)
        assert said in found[pointer], (text, found)
    with file.open("wb") as large:
        large.truncate(100 * 1024 * 1024)
    assert "is larger than" in refused(engineer, *create, "-f", file)[""]

    with_nothing = tmp_path / "nothing"
    with_nothing.mkdir()
    (with_nothing / "README.md").write_text("x")
    assert "holds no weights" in refused(engineer, "bundle", "create", with_nothing, *IDENTIFIED)["."]
    assert engineer.ok("bundle", "list", "--json").json == {"items": []}
    held = stack.clients["engineer"].post(
        "/v1/blobs/missing", json={"digests": [sha256_digest((directory / "model.gguf").read_bytes())]}
    )
    assert len(held.json()["missing"]) == 1


def test_a_file_that_changes_between_hashing_and_sending_is_not_stored(command, directory):
    mismatch = json.dumps({"type": "/problems/digest-mismatch", "title": "Digest mismatch", "detail": "other bytes"})

    def script(asked):
        if asked.path.endswith("/missing"):
            asked_for = json.loads(asked.body)["digests"]
            with (directory / "model.gguf").open("r+b") as file:
                file.write(b"FUGG")
            return answer(200, json.dumps({"missing": asked_for}).encode())
        name = f"sha256:{hashlib.sha256(asked.body).hexdigest()}"
        if not asked.path.endswith(name):
            return answer(422, mismatch.encode(), kind="application/problem+json")
        return answer(201, json.dumps({"digest": name, "size": len(asked.body)}).encode())

    with ScriptedHttp(script) as http:
        command.use(http.url, "token")
        ran = command("bundle", "create", directory, *IDENTIFIED)
    assert ran.status == 2
    assert "model.gguf has changed since it was hashed" in ran.err
    assert [asked.method for asked in http.asked] == ["POST", "PUT", "PUT"]  # and no bundle was posted


def test_bundles_are_listed_and_found_by_a_beginning(engineer, directory):
    made = engineer.ok("bundle", "create", directory, *IDENTIFIED, "--json").json
    labelled = ("--name", "other", "--label", "team=search", "--label", "stage=trial")
    other = engineer.ok("bundle", "create", directory, *IDENTIFIED, *labelled, "--json").json

    listed = engineer.ok("bundle", "list", "--json").json["items"]
    assert [one["name"] for one in listed] == ["other", "chain"]
    assert [one["digest"] for one in engineer.ok("bundle", "list", "--name", "chain", "--json").json["items"]] == [
        made["digest"]
    ]
    assert len(engineer.ok("bundle", "list", "--limit", "1", "--json").json["items"]) == 1
    shown = engineer.ok("bundle", "show", other["digest"][7:17]).out
    for expected in (other["digest"], other["serving_digest"], "model.gguf", "446,400 parameters", "NOASSERTION"):
        assert expected in shown
    assert made["digest"] in engineer.ok("bundle", "list").out
    found = engineer.ok("bundle", "list", "--label", "stage=trial", "--label", "team=search", "--json").json["items"]
    assert [one["digest"] for one in found] == [other["digest"]]
    assert "stage=trial team=search" in shown
    # What a file touched is found by its bytes, whatever it is called, by its digest or by the file itself.
    for which in (
        directory / "model.gguf",
        "sha256:" + hashlib.sha256((directory / "model.gguf").read_bytes()).hexdigest(),
    ):
        touched = engineer.ok("bundle", "list", "--made-of", which, "--json").json["items"]
        assert {one["digest"] for one in touched} >= {made["digest"], other["digest"]}
        fewer = engineer.ok("bundle", "list", "--made-of", which, "--label", "team=search", "--json").json["items"]
        assert [one["digest"] for one in fewer] == [other["digest"]]
    assert engineer.ok("bundle", "list", "--made-of", "f" * 64).out == "no bundle matches\n"
    assert engineer("bundle", "list", "--made-of", "f" * 60).status == 2
    for wrong in (("--label", "team"), ("--label", "team=a", "--label", "team=b"), ("--label", "Team=a")):
        assert engineer("bundle", "list", *wrong).status == 2
        assert engineer("bundle", "create", directory, *IDENTIFIED, *wrong).status == 2
    assert engineer("bundle", "show", "0" * 8).status == 2
    assert engineer("bundle", "show", "0" * 7).status == 2
    assert engineer("bundle", "show", "sha256:" + "0" * 64).status == 2


def test_an_engine_that_is_not_installed_here_must_be_named(engineer, directory, monkeypatch, tmp_path):
    monkeypatch.setattr("gates.environment._places", {})
    place_engines(dict.fromkeys(("sglang", "vllm", "transformers"), tmp_path / "nowhere"))
    for name in ("vllm", "transformers"):
        said = refused(engineer, "bundle", "create", directory, "--engine", name)[""]
        assert f"install it with `make engine-{name}`" in said
        assert "--engine-image" in said
    said = refused(engineer, "bundle", "create", directory, "--engine", "sglang")[""]
    assert "--engine-image" in said
    assert "make engine" not in said
    image = "example.test/vllm@sha256:" + "a" * 64
    document = engineer.ok(
        "bundle", "create", directory, "--engine", "vllm", "--engine-image", image, "--engine-version", "0.32.0",
        "--dry-run", "--json",
    ).json  # fmt: skip
    assert document["engine"]["image"] == image
    both = (*IDENTIFIED, "--engine-image", image)
    assert "exactly one" in refused(engineer, "bundle", "create", directory, *both)["/engine"]


def test_what_the_engine_does_not_read_is_left_out_and_listed_with_the_reason(command, directory):
    command.use("http://127.0.0.1:1", "token")
    shutil.copy(directory / "model.gguf", directory / "chain-Q8_0.gguf")
    for name in ("config.json", "convert.py", "pytorch_model.bin", "figure 1.png"):
        (directory / name).write_text("x")
    create = ("bundle", "create", directory, *IDENTIFIED, "--dry-run")

    assert "several models" in refused(command, *create)["."]
    ran = command.ok(*create, "--weights", "q8_0", "--json")

    assert [file["path"] for file in ran.json["files"]] == ["chain-Q8_0.gguf", "chat_template.jinja"]
    for said in (
        "config.json (llamacpp does not read it)",
        "convert.py (code",
        "figure 1.png (media)",
        "model.gguf (another quantization",
        "pytorch_model.bin (pickled",
    ):
        assert f"left out: {said}" in ran.err


def test_a_refused_file_is_told_with_its_reason_its_place_and_what_was_found(command, directory):
    command.use("http://127.0.0.1:1", "token")
    raw = (directory / "model.gguf").read_bytes()
    (directory / "model.gguf").write_bytes(raw[:-1000])
    ran = command("bundle", "create", directory, *IDENTIFIED, "--dry-run", "--json")
    assert ran.status == 2
    (error,) = ran.json["errors"]
    assert error["detail"].startswith("has ")
    assert error | {"detail": ""} == {
        "pointer": "model.gguf",
        "detail": "",
        "code": "data-truncated",
        "offset": len(raw) - 1000,
        "found": error["found"],
        "expected": str(int(error["found"]) + 1000),
    }


def test_code_that_the_engine_shall_run_is_named_file_by_file(command, tmp_path):
    command.use("http://127.0.0.1:1", "token")
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(safetensors({"a": tensor(0, 4)}, b"\0" * 4))
    (directory / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}}')
    (directory / "modeling_own.py").write_text("class Own: ...")
    told = tmp_path / "bundle.json"
    engine = {"name": "vllm", "arguments": ["--trust-remote-code"]}
    told.write_text(json.dumps({"name": "own", "engine": engine}))
    create = ("bundle", "create", directory, "-f", told, *IDENTIFIED, "--dry-run")
    assert "modeling_own.py" in refused(command, *create)["config.json"]

    code = {"files": ["modeling_own.py"], "reason": "read by two people"}
    told.write_text(json.dumps({"name": "own", "engine": engine | {"remote_code": code}}))
    document = command.ok(*create, "--json").json

    assert document["engine"]["remote_code"] == code
    assert {file["path"]: file["role"] for file in document["files"]}["modeling_own.py"] == "code"
