"""A bundle's files from several sources: what each brings, where it is placed, and what is never fetched."""

import json
import os

import pytest

from gates.directory import DirectoryRefused, read_directory
from gates.files.contents import Reader
from gates.sources.assembly import Assembly, Wants
from gates.sources.directory import DirectorySource
from gates.sources.hosts import Hosts
from gates.sources.hub import HubSource
from gates.sources.source import SourceRefused
from gates.sources.store import FetchStore
from gates.sources.web import Web
from schemas.bundle import Role
from tests.gates.sources.conftest import QUICK
from tests.support.headers import safetensors, tensor
from tests.support.hub import Hub, Repository

VLLM = Reader("vllm")
WEIGHTS = safetensors({"a": tensor(0, 4)}, b"\0" * 4)
BASE = {
    ".gitattributes": b"x",
    "README.md": b"---\nlicense: mit\n---\n",
    "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"never fetched",
    "original/consolidated.00.pth": b"never fetched",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-Q4_K_M.gguf": b"never fetched",
    "figure.png": b"never fetched",
}
ADAPTER = {
    "README.md": b"an adapter",
    "adapter_config.json": json.dumps({"r": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}).encode(),
    "adapter_model.safetensors": WEIGHTS,
}


@pytest.fixture
def put(tmp_path):
    """Assemble from repositories of a hub; parts that are paths are directories."""
    repositories = {
        "org/base": Repository(BASE, {"model.safetensors"}),
        "org/tok": Repository({"tokenizer.json": b'{"b": 1}', "config.json": b"{}", "special_tokens_map.json": b"{}"}),
        "org/lora": Repository(ADAPTER, {"adapter_model.safetensors"}),
        "org/template": Repository({"llama3.jinja": b"{{ 1 }}", "readme.txt": b""}),
        "org/code": Repository({"modeling_own.py": b"class Own: ...", "setup.py": b"evil"}),
        "org/draft": Repository({"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}),
    }

    class Put:
        hub = None

        def __call__(self, parts, *, reader=VLLM, exclude=(), roles=None):
            with Web(Hosts(named=[self.hub.url(), self.hub.url("cdn")])) as web:
                sources = {
                    part: HubSource(asked, web, self.hub.url()) if isinstance(asked, str) else DirectorySource(asked)
                    for part, asked in parts.items()
                }
                wants = Wants(reader, tuple(exclude), roles or {})
                assembly = Assembly(sources, wants, FetchStore(tmp_path / "store"), QUICK)
                assembly.choose()
                assembly.fetch()
                return assembly.read()

        def fetched(self):
            return {one.path.partition("/resolve/")[2][41:] for one in self.hub.asked if "/resolve/" in one.path}

    one = Put()
    with Hub(repositories) as hub:
        one.hub = hub
        yield one


def placed(found):
    return {file.path: str(file.role) for file in found.contents.files}


def left_out(found):
    return {one.path: one.code for one in found.contents.left_out}


def test_only_what_the_engine_reads_is_fetched_and_the_rest_is_listed(put):
    found = put({"base": "hf:org/base"})
    kept = {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert placed(found).keys() == kept == put.fetched()
    assert left_out(found) == {
        ".gitattributes": "hidden",
        "figure.png": "media",
        "model-Q4_K_M.gguf": "other-format",
        "original/consolidated.00.pth": "pickled",
        "pytorch_model.bin": "pickled",
    }
    pin = found.sources["base"]
    assert (pin.kind, pin.location, pin.asked) == ("huggingface", "org/base", "hf:org/base")
    assert pin.revision == put.hub.repositories["org/base"].commit


def test_a_repository_and_a_directory_with_its_files_are_read_alike(put, tmp_path):
    folder = tmp_path / "base"
    for path, body in BASE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(body)
    there, here = put({"base": "hf:org/base"}).contents, read_directory(folder, VLLM)
    assert [(f.path, f.sha256, f.size, f.role, f.facts) for f in there.files] == [
        (f.path, f.sha256, f.size, f.role, f.facts) for f in here.files
    ]
    assert put({"base": folder}).sources["base"].revision == here.revision


def test_each_part_has_a_pin_and_a_place_of_its_own(put, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for path, body in ADAPTER.items():
        (own / path).write_bytes(body)
    reader = Reader("vllm", code=frozenset({"modeling_own.py"}))
    parts = {
        "adapter:de": "hf:org/lora",
        "adapter:fr": own,
        "base": "hf:org/base",
        "code": "hf:org/code",
        "draft": "hf:org/draft",
        "template": "hf:org/template@main",
        "tokenizer": "hf:org/tok",
    }
    found = put(parts, reader=reader)
    assert placed(found) == {
        "README.md": "documentation",
        "adapters/de/adapter_config.json": "adapter",
        "adapters/de/adapter_model.safetensors": "adapter",
        "adapters/fr/adapter_config.json": "adapter",
        "adapters/fr/adapter_model.safetensors": "adapter",
        "chat_template.jinja": "template",
        "config.json": "config",
        "draft/config.json": "draft",
        "draft/model.safetensors": "draft",
        "model.safetensors": "weights",
        "modeling_own.py": "code",
        "special_tokens_map.json": "tokenizer",
        "tokenizer.json": "tokenizer",
    }
    files = {file.path: file for file in found.contents.files}
    assert files["chat_template.jinja"].place.read_bytes() == b"{{ 1 }}"
    assert files["tokenizer.json"].place.read_bytes() == b'{"b": 1}'
    # None of the base's tokenizer is left beside the other one.
    assert [path for path, code in left_out(found).items() if code == "replaced"] == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(found.sources) == ["base", *sorted(parts.keys() - {"base"})]
    commits = {
        part: put.hub.repositories[text[3:].partition("@")[0]].commit for part, text in parts.items() if text != own
    }
    assert {part: pin.revision for part, pin in found.sources.items() if pin.kind == "huggingface"} == commits
    assert found.sources["adapter:fr"].revision.startswith("sha256:")
    assert "setup.py" not in put.fetched()


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        ("adapter:x", "hf:org/base"),
        ("template", "hf:org/tok"),
        ("tokenizer", "hf:org/lora"),
        ("code", "hf:org/code"),
        ("draft", "hf:org/tok"),
    ],
)
def test_a_part_that_a_source_does_not_have_is_refused(put, part, asked):
    with pytest.raises(SourceRefused) as refused:
        put({"base": "hf:org/base", part: asked})
    assert refused.value.code in {"part-empty", "weights-missing"}
    assert put.fetched() == set()


def test_an_adapter_in_gguf_is_refused_with_what_to_do_and_not_taken_for_nothing(put):
    files = {"de-lora.gguf": b"GGUF", "README.md": b"an adapter"}
    put.hub.repositories["org/packed"] = Repository(files, {"de-lora.gguf"}, name="org/packed")
    with pytest.raises(SourceRefused) as refused:
        put({"base": "hf:org/base", "adapter:de": "hf:org/packed"})
    assert (refused.value.code, refused.value.file) == ("adapter-format", "de-lora.gguf")
    assert "merge it into the base" in refused.value.advice
    assert put.fetched() == set()


@pytest.mark.parametrize("folder", ["lora", "adapters/own", "adapters/de"])
def test_a_part_may_lie_in_the_folder_of_the_base_and_is_taken_once(put, tmp_path, folder):
    for path, body in ADAPTER.items():
        (tmp_path / "base" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / folder / path).write_bytes(body)
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").write_bytes(safetensors({"a": tensor(0, 8)}, b"\0" * 8))
    found = put({"base": tmp_path / "base", "adapter:de": tmp_path / "base" / folder})
    adapters = ["adapters/de/adapter_config.json", "adapters/de/adapter_model.safetensors"]
    assert [path for path, role in placed(found).items() if role == "adapter"] == adapters
    replaced = {path for path, code in left_out(found).items() if code == "replaced"}
    assert replaced == {f"{folder}/{path}" for path in ADAPTER}


def test_two_parts_cannot_bring_one_file(put):
    reader = Reader("vllm", code=frozenset({"tokenizer.json"}))
    with pytest.raises(SourceRefused) as refused:
        put({"base": "hf:org/base", "tokenizer": "hf:org/tok", "code": "hf:org/base"}, reader=reader)
    assert (refused.value.code, refused.value.file) == ("placed-twice", "tokenizer.json")


def test_names_are_refused_before_a_byte_is_fetched(put):
    put.hub.repositories["org/base"].files = {**BASE, "Config.json": b"{}", "con.json": b"{}", "a b.jinja": b""}
    with pytest.raises(DirectoryRefused) as refused:
        put({"base": "hf:org/base"})
    assert {(one.file, one.code) for one in refused.value.refusals} == {
        ("a b.jinja", "name-characters"),
        ("config.json", "case-collision"),
    }
    assert put.fetched() == set()


def test_what_a_person_says_of_paths_holds_for_sources(put):
    found = put({"base": "hf:org/base"}, exclude=["*.md"], roles={"figure.png": Role.DOCUMENTATION})
    assert left_out(found)["README.md"] == "excluded"
    assert placed(found)["figure.png"] == "documentation"
    with pytest.raises(DirectoryRefused) as refused:
        put({"base": "hf:org/base"}, roles={"nothing.json": Role.CONFIG})
    assert refused.value.refusals[0].code == "role-without-file"


def test_several_models_are_told_apart_before_a_byte_is_fetched(put):
    put.hub.repositories["org/base"].files = {"a-Q4_K_M.gguf": b"4", "a-Q8_0.gguf": b"8"}
    with pytest.raises(DirectoryRefused) as refused:
        put({"base": "hf:org/base"}, reader=Reader("llamacpp"))
    assert refused.value.refusals[0].code == "weights-ambiguous"
    assert put.fetched() == set()


def test_files_that_get_further_names_while_they_are_read_have_not_changed(put, tmp_path):
    with Web(Hosts(named=[put.hub.url(), put.hub.url("cdn")])) as web:
        assembly = Assembly(
            {"base": HubSource("hf:org/base", web, put.hub.url())}, Wants(VLLM), FetchStore(tmp_path / "store"), QUICK
        )
        assembly.choose()
        assembly.fetch()
        further = tmp_path / "further"
        further.mkdir()

        def link(_count, _total):
            for number, (_, place) in enumerate(assembly.places):
                if not (further / str(number)).exists():
                    (further / str(number)).hardlink_to(place)

        assembly.read(progress=link)
        assert list(further.iterdir()) != []
        # Damage that left no trace but the bytes is found when they are read, and gone the next time.
        place = dict(assembly.places)["model.safetensors"]
        state = place.stat()
        place.chmod(0o600)
        place.write_bytes(WEIGHTS[:-4] + b"\1\1\1\1")
        os.utime(place, ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(DirectoryRefused) as refused:
            assembly.read()
        assert [one.code for one in refused.value.refusals] == ["digest-mismatch"]
        assembly.fetch()
        assembly.read()
        assert place.read_bytes() == WEIGHTS
