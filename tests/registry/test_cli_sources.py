"""`bundle create` from sources: the same bundle as from a directory, with what was asked for and what it became."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from gates.files.contents import role_of
from registry.cli.sources import PROXY_VARIABLES
from schemas.bundle import Bundle, Role
from tests.support.chain import write_bundle_directory
from tests.support.checkpoints import adapt, micro, speak
from tests.support.headers import safetensors, tensor
from tests.support.hub import Hub, Repository, answer

IDENTIFIED = ("--engine-environment", "sha256:" + "e" * 64, "--engine-version", "1.0")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_bundle_directory(tmp_path_factory.mktemp("written") / "chain")


@pytest.fixture
def hub(written, monkeypatch):
    files = {path.name: path.read_bytes() for path in written.iterdir()}
    repository = Repository({**files, "chain-Q8_0.gguf": b"never fetched"}, {"model.gguf", "chain-Q8_0.gguf"})
    with Hub({"org/chain": repository}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url())
        for variable in ("HF_TOKEN", "SLUICEGATE_ALLOW_HOSTS"):
            monkeypatch.delenv(variable, raising=False)
        yield hub


@pytest.fixture
def create(command, hub):
    command.use("http://127.0.0.1:1", "token")

    def run(*words: object):
        allowed = ("--allow-host", hub.url("cdn"))
        return command(
            "bundle", "create", *words, "--weights", "model.gguf", *allowed, *IDENTIFIED, "--dry-run", "--json"
        )

    return run


def test_a_repository_becomes_the_bundle_that_a_directory_with_its_files_becomes(create, hub, written, command):
    made = create("hf:org/chain")
    assert made.status == 0, made
    bundle, commit = Bundle.model_validate(made.json), hub.repositories["org/chain"].commit
    assert [source.model_dump() for source in bundle.sources] == [
        {"kind": "huggingface", "location": "org/chain", "revision": commit}
    ]
    directory = Bundle.model_validate(create(written).json)
    assert bundle.serving_digest == directory.serving_digest
    assert bundle.files == directory.files
    assert f"base: hf:org/chain is {commit}" in made.err
    assert "left out: chain-Q8_0.gguf (another quantization" in made.err
    # By a branch or by its commit, the first or the second time: one bundle, and no byte twice.
    hub.asked.clear()
    assert Bundle.model_validate(create(f"hf:org/chain@{commit}").json).digest == bundle.digest
    assert not any("/resolve/" in request.path for request in hub.asked)
    assert (command.home / "cache" / "sluicegate" / "fetched" / "sha256").is_dir()


def test_parts_come_from_other_sources_by_option_or_by_file(create, hub, tmp_path):
    hub.repositories["org/template"] = Repository({"own.jinja": b"{{ 1 }}"}, name="org/template")
    by_option = create("hf:org/chain", "--from", "template=hf:org/template", "--cache", tmp_path / "own")
    assert by_option.status == 0, by_option
    file = tmp_path / "bundle.json"
    file.write_text(json.dumps({"from": {"template": "hf:org/template"}}))
    by_file = create("hf:org/chain", "-f", file)
    assert by_file.json == by_option.json
    bundle = Bundle.model_validate(by_file.json)
    assert [source.location for source in bundle.sources] == ["org/chain", "org/template"]
    sha256 = {file.path: file.sha256 for file in bundle.files}["chat_template.jinja"]
    assert sha256 == "sha256:" + hashlib.sha256(b"{{ 1 }}").hexdigest()
    assert (tmp_path / "own" / "sha256" / sha256[7:9] / sha256[7:]).read_bytes() == b"{{ 1 }}"


def test_files_over_https_are_pinned_by_their_digest_or_by_what_was_received(create, hub, written):
    body = (written / "model.gguf").read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    hub.lies["cdn"] = lambda request: answer(200, body) if "model.gguf" in request.path else None
    given = create(f"{hub.url('cdn')}/models/model.gguf#sha256={digest}", "--name", "chain")
    received = create(f"{hub.url('cdn')}/models/model.gguf?signature=secret", "--name", "chain")
    assert (given.status, received.status) == (0, 0), (given, received)
    assert "pinned by what was received" in received.err
    assert "pinned by what was received" not in given.err
    assert given.json["sources"][0]["revision"] == f"sha256:{digest}"
    assert given.json["files"] == received.json["files"]
    assert "secret" not in received.out + received.err


def test_an_address_s_query_is_shown_nowhere(create, hub, written, tmp_path, command):
    body, report = (written / "model.gguf").read_bytes(), tmp_path / "report.xml"
    hub.lies["cdn"] = lambda request: answer(200, b"none" if "broken" in request.path else body)
    address, allowed = f"{hub.url('cdn')}/model.gguf?signature=secret", ("--allow-host", hub.url("cdn"))
    refused = create(address.replace("model", "broken"))
    assert refused.status == 2
    assert "broken.gguf cannot become a bundle" in refused.out
    told = tmp_path / "bundle.json"
    told.write_text('{"engine": {"name": "llamacpp"}}')
    looked = command("bundle", "validate", address, "-f", told, *allowed, "--junit", report)
    assert "/model.gguf: " in looked.out
    assert "/model.gguf" in report.read_text()
    assert "secret" not in refused.out + refused.err + looked.out + looked.err + report.read_text()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["hf:org/nothing"], 2, "there is no repository org/nothing"),
        (["hf:org/chain@v9"], 2, "has no revision v9"),
        (["hf:org/chain", "--from", "tokenizer=hf:org/chain"], 2, "nothing that tokenizer could bring"),
        (["hf:org/chain", "--from", "tokenizer"], 2, "is no part"),
        (["hf:org/chain", "--from", "base=hf:org/chain"], 2, "is no part"),
        (["hf:org/chain", "--from", "template=./a", "--from", "template=./b"], 2, "one source, not two"),
        (["hf:org/chain", "--allow-host", "a/b"], 2, "more than a host"),
        (["https://127.0.0.1/model.gguf"], 2, "which is inside a network"),
        (["http://mirror.example/model.gguf"], 2, "use https"),
        (["https://no-such-host.invalid/model.gguf"], 4, "is not found"),
        (["hf:a/b/c"], 2, "names no repository"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line(create, words, status, said):
    ran = create(*words)
    assert ran.status == status, ran
    assert said in json.dumps(ran.json)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "all_proxy"])
def test_a_proxy_that_is_not_used_is_named_where_nothing_is_reached(create, hub, monkeypatch, variable):
    for one in PROXY_VARIABLES:
        monkeypatch.delenv(one, raising=False)
    nobody = ("https://127.0.0.1:1/model.gguf", "--allow-host", "127.0.0.1:1")
    assert "proxy" not in create(*nobody).err
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    assert create("hf:org/chain").status == 0
    told = create(*nobody)
    assert (told.status, f"{variable} is set" in told.err + told.out) == (4, True)


def test_a_gated_repository_asks_for_the_token_s_variable_and_takes_it(create, hub, monkeypatch):
    repository = hub.repositories["org/chain"]
    repository.gated, hub.token = True, "hf_secret"
    ran = create("hf:org/chain")
    assert ran.status == 2
    assert "HF_TOKEN" in ran.json["errors"][0]["detail"]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert create("hf:org/chain").status == 0
    assert "hf_secret" not in {request.headers.get("authorization") for request in hub.asked if request.server == "cdn"}


def test_a_host_that_nobody_allowed_is_named_with_the_option_that_allows_it(command, hub, monkeypatch):
    command.use("http://127.0.0.1:1", "token")
    run = ("bundle", "create", "hf:org/chain", "--weights", "model.gguf", *IDENTIFIED, "--dry-run")
    ran = command(*run)
    assert ran.status == 2
    assert "--allow-host" in ran.err
    monkeypatch.setenv("SLUICEGATE_ALLOW_HOSTS", f"mirror.example, {hub.url('cdn')}")
    assert command(*run).status == 0
    shutil.rmtree(command.home / "cache")


def test_a_repository_is_validated_as_a_directory_with_its_files_is(command, hub, written, tmp_path):
    allowed = ("--allow-host", hub.url("cdn"))
    told = tmp_path / "bundle.json"
    told.write_text('{"engine": {"name": "llamacpp"}}')
    hub.repositories["org/chain"].files.pop("chain-Q8_0.gguf")
    there = command("bundle", "validate", "hf:org/chain", "-f", told, *allowed, "--json")
    here = command("bundle", "validate", written, "-f", told, "--json")
    assert there.json == here.json
    assert there.status == here.status == 0
    assert "hf:org/chain: passed" in command("bundle", "validate", "hf:org/chain", "-f", told, *allowed).out
    assert command("bundle", "validate", "hf:org/nothing", *allowed).status == 2


def test_a_base_is_validated_with_the_parts_that_come_from_elsewhere(command, hub, tmp_path):
    whole, base, words = speak(micro(tmp_path / "whole")), tmp_path / "base", tmp_path / "words"
    for folder in (base, words):
        folder.mkdir()
    for path in whole.iterdir():
        shutil.copy(path, words if role_of(path.name) is Role.TOKENIZER else base)
    assert list(words.iterdir())
    there = command("bundle", "validate", base, "--from", f"tokenizer={words}", "--json")
    assert there.json == command("bundle", "validate", whole, "--json").json
    assert there.status == 0
    # The same file of -f serves `create` and `validate`; a part may come from anywhere, and is checked with the base.
    adapt(tmp_path / "de", r=0)
    files = {path.name: path.read_bytes() for path in (tmp_path / "de").iterdir()}
    hub.repositories["org/de"] = Repository(files, name="org/de")
    told = tmp_path / "bundle.json"
    told.write_text(json.dumps({"from": {"tokenizer": str(words), "adapter:de": "hf:org/de"}}))
    ran = command("bundle", "validate", base, "-f", told, "--json")
    assert ran.status == 1
    assert {one["file"] for one in ran.json["findings"] if one["severity"] == "block"} == {
        "adapters/de/adapter_config.json"
    }
    refused = command("bundle", "validate", base, "--from", f"template={tmp_path / 'de'}")
    assert (refused.status, "nothing that template could bring" in refused.err) == (2, True)


PLANNED = ("--device-memory", "1GB", "--activations", "0", "--context", "100", "--json")


@pytest.mark.parametrize(
    ("files", "code", "file"),
    [
        ({"pytorch_model.bin": b"\x80\x02."}, "pickle-weights", None),
        ({"mod\u00e8l.safetensors": b"never fetched"}, "name-refused", "mod\u00e8l.safetensors"),
        ({"model.safetensors": b"never fetched", "setup.exe": b"MZ"}, "program", "setup.exe"),
        ({"README.md": b"none yet"}, "weights-absent", None),
    ],
)
def test_a_repository_whose_choice_of_files_is_refused_has_findings_as_a_directory_has(
    command, hub, tmp_path, files, code, file
):
    files = {"config.json": b"{}", **files}
    hub.repositories["org/odd"] = Repository(files, {one for one in files if one.startswith("model")}, name="org/odd")
    there = command("bundle", "validate", "hf:org/odd", "--json")
    assert (there.status, there.json["verdict"]) == (1, "failed"), there
    (found,) = [one for one in there.json["findings"] if one["code"] == code]
    assert (found["severity"], found["file"]) == ("block", file)
    assert None not in (found["found"] or "", found["expected"], found["advice"])
    shown = command("bundle", "validate", "hf:org/odd")
    assert (shown.status, f"block {code}" in shown.out, "hf:org/odd: failed: 1 finding blocks" in shown.out) == (
        1,
        True,
        True,
    )
    for path, body in files.items():
        (tmp_path / path).write_bytes(body)
    here = command("bundle", "validate", tmp_path, "--json")
    assert here.status == 1
    assert code in {one["code"] for one in here.json["findings"]}
    assert not any("/resolve/" in request.path for request in hub.asked)


def test_a_part_that_is_not_there_is_named_and_so_is_its_place(command, tmp_path):
    speak(micro(tmp_path / "m"))
    ran = command("bundle", "validate", tmp_path / "m", "--from", "tokenizer=/nope", "--json")
    (error,) = ran.json["errors"]
    assert (ran.status, error["pointer"]) == (2, "tokenizer")
    assert error["detail"].startswith("there is no directory /nope")


def test_a_part_that_is_a_file_is_asked_for_as_a_directory(command, tmp_path):
    speak(micro(tmp_path / "m"))
    (tmp_path / "loud.gguf").write_bytes(b"GGUF")
    ran = command("bundle", "create", tmp_path / "m", "--from", f"adapter:loud={tmp_path / 'loud.gguf'}", "--json")
    (error,) = ran.json["errors"]
    assert (ran.status, error["pointer"]) == (2, "adapter:loud")
    assert error["detail"].startswith(
        f"{tmp_path / 'loud.gguf'} is a file, and what is taken is a directory; put it into"
    )


def test_a_repository_is_planned_by_its_headers_and_its_weights_are_not_fetched(command, hub, tmp_path):
    root, body = micro(tmp_path / "micro"), bytes(32 << 20)
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    half = len(body) // 2
    header = safetensors({name: tensor(at * half, (at + 1) * half) for at, name in enumerate(names)}, b"")
    (root / "model.safetensors").write_bytes(header + body)
    files = {path.name: path.read_bytes() for path in root.iterdir()}
    hub.repositories["org/large"] = Repository(files, {"model.safetensors"}, name="org/large")
    brought = []

    def slowly(request):
        yield answer(200, b"", {"content-length": len(header) + len(body)}) + header
        for _ in range(512):
            brought.append(1 << 16)
            yield body[: 1 << 16]

    hub.lies["cdn"] = slowly
    there = command("bundle", "plan", "hf:org/large", "--allow-host", hub.url("cdn"), *PLANNED)
    assert there.status == 0, there
    assert there.json == command.ok("bundle", "plan", root, *PLANNED).json
    assert there.json["devices"][0]["weight_bytes"] == len(body)
    assert sum(brought) < len(body) // 2  # what was on its way when the header had come
    assert f"base: hf:org/large is {hub.repositories['org/large'].commit}" in there.err
    # With a part from elsewhere, which takes memory of its own.
    adapt(tmp_path / "de")
    more = command("bundle", "plan", root, "--from", f"adapter:de={tmp_path / 'de'}", *PLANNED)
    assert more.json["devices"][0]["adapter_bytes"] > 0


def test_a_file_over_https_and_a_bucket_are_planned_by_their_headers(command, hub, written, s3_server, monkeypatch):
    body, asked = (written / "model.gguf").read_bytes(), ("--allow-host", hub.url("cdn"))
    here = command("bundle", "plan", written, *PLANNED)
    assert here.status == 0, here
    hub.lies["cdn"] = lambda request: answer(200, body)
    there = command("bundle", "plan", f"{hub.url('cdn')}/model.gguf?signature=secret", *asked, *PLANNED)
    assert (there.json["devices"], "secret" in there.out + there.err) == (here.json["devices"], False)
    hub.lies["cdn"] = lambda request: answer(200, body, {"content-length": None})
    endless = command("bundle", "plan", f"{hub.url('cdn')}/model.gguf", *asked, *PLANNED)
    assert (endless.status, "without a length" in endless.err + endless.out) == (2, True)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.url)
    prefix = s3_server.place()
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/model.gguf", Body=body)
    stored = command("bundle", "plan", f"s3://{s3_server.bucket}/{prefix}", *PLANNED)
    assert stored.json["devices"] == here.json["devices"]


def test_the_record_of_a_bundle_says_what_was_asked_for_and_what_it_was(command, stack, hub):
    command.be("engineer", stack)
    commit = hub.repositories["org/chain"].commit
    words = ("--weights", "model.gguf", "--allow-host", hub.url("cdn"), *IDENTIFIED, "--json")
    made = command.ok("bundle", "create", "hf:org/chain@main", "--name", "locked", *words).json
    shown = command.ok("bundle", "show", made["digest"], "--json").json
    (lock,) = shown["locks"]
    assert lock | {"resolved_at": ""} == {
        "part": "base",
        "kind": "huggingface",
        "asked": "hf:org/chain@main",
        "location": "org/chain",
        "revision": commit,
        "resolved_at": "",
    }
    told = command.ok("bundle", "show", made["digest"]).out
    assert f"hf:org/chain@main  {commit}" in told
    assert "as whoever registered it said" in told
    stack.clients["viewer"].post("/login", data={"token": stack.tokens["viewer"], "next": "/"})
    page = stack.clients["viewer"].get(f"/bundles/{made['digest']}").text
    assert f"<code>hf:org/chain@main</code> was <code>{commit}</code>" in page
    assert "as whoever registered it said" in page
    # The same bundle once more, by its commit: it was there, and its record is the first one's.
    again = command.ok("bundle", "create", f"hf:org/chain@{commit}", "--name", "locked", *words).json
    assert (again["digest"], again["is_new"], again["bytes_sent"]) == (made["digest"], False, 0)
    assert command.ok("bundle", "show", made["digest"], "--json").json == shown


def of_several(tmp_path, files: dict[str, bytes]) -> tuple[Path, Repository]:
    """The same files as a directory and as a repository."""
    for name, raw in files.items():
        (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes(raw)
    weights = {name for name in files if name.endswith((".gguf", ".safetensors"))}
    return tmp_path / "m", Repository(files, weights, name="org/several")


@pytest.mark.parametrize("is_first_broken", [False, True])
def test_of_several_models_elsewhere_the_first_is_looked_at_as_of_those_in_a_directory(
    command, hub, written, tmp_path, is_first_broken
):
    good, bad = (written / "model.gguf").read_bytes(), b"GGUF\x03\0\0\0\x05"
    first, second = (bad, good) if is_first_broken else (good, bad)
    files = {"m-q4_0.gguf": first, "m-q8_0.gguf": second}
    directory, hub.repositories["org/several"] = of_several(tmp_path, files)
    told = {}
    for source in (directory, "hf:org/several"):
        ran = command("bundle", "validate", source, "--allow-host", hub.url("cdn"), "--engine", "llamacpp", "--json")
        assert ran.status == int(is_first_broken), ran
        told[source] = ran.json
    assert told["hf:org/several"]["findings"] == told[directory]["findings"]
    (several,) = (one for one in told[directory]["findings"] if one["code"] == "weights-several")
    assert (several["file"], several["found"]) == ("m-q4_0.gguf", ["m-q4_0.gguf", "m-q8_0.gguf"])
    assert "several models: m-q4_0.gguf is looked at" in ran.err
    # Of what nobody looks at, no byte is fetched; of the one that is chosen, all.
    assert {request.path.rpartition("/")[2] for request in hub.asked if "/resolve/" in request.path} == {"m-q4_0.gguf"}
    chosen = command(
        "bundle", "validate", "hf:org/several", "--weights", "m-q8_0.gguf", "--allow-host", hub.url("cdn"), "--json"
    )
    assert chosen.status == int(not is_first_broken)


def test_several_sets_of_weights_elsewhere_are_told_as_those_of_a_directory(command, hub, tmp_path):
    root = speak(micro(tmp_path / "micro"))
    files = {path.name: path.read_bytes() for path in root.iterdir()}
    weights = files.pop("model.safetensors")
    directory, hub.repositories["org/several"] = of_several(
        tmp_path, {**files, "a.safetensors": weights, "b.safetensors": weights}
    )
    told = []
    for source in (directory, "hf:org/several"):
        ran = command("bundle", "validate", source, "--allow-host", hub.url("cdn"), "--engine", "vllm", "--json")
        told.append((ran.status, ran.json["verdict"], ran.json["findings"]))
    assert told[0] == told[1]
    assert "duplicate-weight-sets" in {one["code"] for one in told[0][2]}


def test_whoever_registers_one_of_several_models_is_told_the_choices_and_the_option(command, hub, written, tmp_path):
    command.use("http://127.0.0.1:1", "token")
    good = (written / "model.gguf").read_bytes()
    files = {f"{name}.gguf": good for name in ("x-q4_0", "q4_0", "x-00001-of-00002", "x-00002-of-00002")}
    directory, hub.repositories["org/several"] = of_several(tmp_path, files)
    words = ("--allow-host", hub.url("cdn"), *IDENTIFIED, "--name", "x", "--dry-run", "--json")
    for source in (directory, "hf:org/several"):
        ran = command("bundle", "create", source, *words)
        (error,) = ran.json["errors"]
        assert (ran.status, error["code"]) == (2, "weights-ambiguous")
        options = ["q4_0.gguf", "x-00001-of-00002.gguf", "x-q4_0.gguf"]
        assert "choose one with " + " or ".join(f"--weights {one}" for one in options) in error["detail"]
        for option in options:
            made = command("bundle", "create", source, "--weights", option, *words)
            assert "weights-ambiguous" not in made.out
            left = {one for one in files if f"left out: {one} (another quantization" in made.err}
            assert left == files.keys() - {option, option.replace("-00001-", "-00002-")}, made


def test_a_prefix_of_a_bucket_becomes_the_bundle_that_the_directory_becomes(command, written, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.url)
    prefix = s3_server.place()
    for path in written.iterdir():
        s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    address = f"s3://{s3_server.bucket}/{prefix}"
    made = command("bundle", "create", address, *IDENTIFIED, "--name", "chain", "--dry-run", "--json")
    assert made.status == 0, made
    bundle = Bundle.model_validate(made.json)
    local = command("bundle", "create", written, *IDENTIFIED, "--name", "chain", "--dry-run", "--json")
    assert bundle.serving_digest == Bundle.model_validate(local.json).serving_digest
    (source,) = bundle.sources
    assert (source.kind, source.location) == ("s3", f"{s3_server.bucket}/{prefix}")
    assert "the bucket keeps no versions" in made.err
