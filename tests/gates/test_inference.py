import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from gates.directory import DirectoryRefused, read_directory
from gates.inference import EngineChoice, bundle_document, merge
from schemas.bundle import Bundle
from tests.support.chain import describe, write_bundle_directory, write_chain

ENVIRONMENT = "sha256:" + "0" * 64
LLAMACPP = EngineChoice("llamacpp", "2026.10.11549", ENVIRONMENT)
VLLM = EngineChoice("vllm", "0.32.0", ENVIRONMENT)


def document(directory: Path, engine: EngineChoice = LLAMACPP, name: str | None = "chain") -> dict:
    contents = read_directory(directory, engine.reader())
    return bundle_document(contents, name=name, engine=engine)


def bundle(directory: Path, engine: EngineChoice = LLAMACPP) -> Bundle:
    return Bundle.model_validate(document(directory, engine))


@pytest.fixture
def chain(tmp_path) -> Path:
    return write_bundle_directory(tmp_path / "chain")


@pytest.fixture
def hub(tmp_path) -> Path:
    """A directory as a Hugging Face repository has it."""
    directory = tmp_path / "hub"
    directory.mkdir()
    shards = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    for file, tensor in shards.items():
        save_file({tensor: np.zeros((3, 2), np.float16)}, directory / file)
    index = {"metadata": {}, "weight_map": {tensor: file for file, tensor in shards.items()}}
    texts = {
        "model.safetensors.index.json": json.dumps(index),
        "config.json": json.dumps(
            {"model_type": "llama", "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": [4, 5]}
        ),
        "generation_config.json": json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}),
        "tokenizer.json": json.dumps({"model": {"type": "BPE"}}),
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
        "README.md": "---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n",
        "LICENSE": "Apache License",
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    return directory


def test_a_gguf_tells_what_was_written_into_it(chain):
    made = bundle(chain)

    assert made.model.model_dump() == {"format": "gguf", "architecture": "llama", "parameters": 446400}
    assert made.quantization.model_dump(exclude_none=True) == {"method": "none", "bits": 32}
    assert made.tokenizer.origin == "weights"
    assert made.tokenizer.special_tokens == {"bos": 1, "eos": 4, "pad": 0}
    assert made.template.model_dump(exclude_none=True) == {"origin": "file", "file": "chat_template.jinja"}
    assert made.runtime.model_dump(exclude_none=True) == {"context_tokens": 2048, "max_sequences": 4}
    assert made.licence.identifier == "NOASSERTION"
    assert made.files == describe(chain, environment=ENVIRONMENT).files


def test_the_template_in_the_weights_counts_when_there_is_no_file(tmp_path):
    with_it = write_bundle_directory(tmp_path / "with", template=None)
    assert bundle(with_it).template.origin == "weights"
    without = tmp_path / "without"
    without.mkdir()
    write_chain(without / "model.gguf", template=None)
    assert bundle(without).template.origin == "none"


def test_sampling_defaults_in_the_weights_are_declared(tmp_path):
    directory = tmp_path / "sampling"
    directory.mkdir()
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    write_chain(directory / "model.gguf", metadata=metadata)
    sampling = bundle(directory).runtime.sampling
    assert sampling is not None
    assert sampling.model_dump(mode="json", exclude_none=True) == {
        "temperature": "0.6",
        "top_k": 20,
        "repetition_penalty": "1.1",
    }


def test_a_hub_directory_tells_what_its_files_say(hub):
    made = bundle(hub, VLLM)

    assert made.model.model_dump() == {"format": "safetensors", "architecture": "llama", "parameters": 12}
    assert made.tokenizer.origin == "files"
    assert made.tokenizer.special_tokens == {"bos": 1}
    assert made.template.origin == "tokenizer_config"
    assert made.quantization.model_dump(exclude_none=True) == {"method": "none"}
    assert made.licence.model_dump() == {"identifier": "Apache-2.0", "file": "LICENSE"}
    assert made.runtime.context_tokens == 2048
    assert made.runtime.sampling is not None
    assert made.runtime.sampling.model_dump(mode="json", exclude_none=True) == {
        "temperature": "0.6",
        "top_p": "0.95",
        "top_k": 20,
    }


def test_a_quantized_hub_directory_names_method_bits_and_group(hub):
    config = json.loads((hub / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (hub / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros((3, 2), np.int32)}, hub / "model-00001-of-00002.safetensors")

    made = bundle(hub, VLLM)

    assert made.quantization.model_dump(exclude_none=True) == {"method": "awq", "bits": 4, "group_size": 128}
    assert made.model.parameters is None  # packed integers: the count of numbers is not the count of weights


def test_an_adapter_beside_the_model_is_declared(hub):
    folder = hub / "adapters" / "German"
    folder.mkdir(parents=True)
    save_file({"lora_A": np.zeros((8, 2), np.float16)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["v_proj", "q_proj"]}))

    (adapter,) = bundle(hub, VLLM).adapters or []

    assert adapter.model_dump(exclude_none=True) == {
        "name": "german",
        "files": ["adapters/German/adapter_config.json", "adapters/German/adapter_model.safetensors"],
        "rank": 8,
        "target_modules": ["q_proj", "v_proj"],
    }


@pytest.mark.parametrize(
    ("engine", "context", "sequences"),
    [
        (LLAMACPP, 2048, 4),
        (EngineChoice("llamacpp", arguments=("--ctx-size", "1024")), 256, 4),
        (EngineChoice("llamacpp", arguments=("--ctx-size", "1024", "--parallel", "2")), 512, 2),
        (EngineChoice("llamacpp", arguments=("--ctx-size", "1024", "--parallel", "2", "--kv-unified")), 1024, 2),
        (EngineChoice("llamacpp", arguments=("--parallel", "many")), 2048, 4),
        (EngineChoice("llamacpp", arguments=("--parallel",)), 2048, 4),
        (EngineChoice("vllm", arguments=("--max-model-len", "512", "--max-num-seqs", "8")), 512, 8),
    ],
)
def test_limits_follow_the_launch_arguments_and_the_model(chain, engine, context, sequences):
    assert document(chain, engine)["runtime"] == {"context_tokens": context, "max_sequences": sequences}


def test_the_document_is_the_same_wherever_the_directory_lies(chain, tmp_path):
    other = Path(shutil.copytree(chain, tmp_path / "another" / "place"))
    (other / ".cache").mkdir()
    assert bundle(other).digest == bundle(chain).digest
    (other / "chat_template.jinja").write_text("changed")
    assert bundle(other).digest != bundle(chain).digest


def test_the_name_comes_from_the_weights_when_none_is_given(chain, hub):
    assert document(chain, name=None)["name"] == "chain"
    assert "name" not in document(hub, VLLM, name=None)  # the schema then says what is missing


# ------------------------------------------------------------------------------------------- what is not whole


def refused(directory: Path, engine: EngineChoice = LLAMACPP) -> str:
    with pytest.raises(DirectoryRefused) as error:
        document(directory, engine)
    return str(error.value)


def test_several_models_in_one_directory_are_refused(chain):
    shutil.copy(chain / "model.gguf", chain / "other.gguf")
    assert "several models: model.gguf, other.gguf" in refused(chain)


def test_of_two_weight_formats_the_one_that_the_engine_reads_is_declared(chain):
    save_file({"a": np.zeros(2, np.float16)}, chain / "model.safetensors")
    assert document(chain)["model"]["format"] == "gguf"
    assert document(chain, VLLM)["model"]["format"] == "safetensors"


def test_code_that_comes_with_a_model_is_taken_only_by_name(hub):
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_x.X"}}))
    (hub / "modeling_x.py").write_text("X = 1")
    assert "needs code that comes with the model, modeling_x.py" in refused(hub, VLLM)
    trusting = replace(VLLM, arguments=("--trust-remote-code",))
    assert "lets the engine run code" in refused(hub, trusting)
    accepting = replace(trusting, remote_code=("modeling_x.py",))
    made = document(hub, accepting)
    assert {file["path"]: file["role"] for file in made["files"]}["modeling_x.py"] == "code"
    with pytest.raises(ValidationError, match=r"modeling_x.py is code that engine.remote_code does not name"):
        Bundle.model_validate(made)
    exception = {"files": ["modeling_x.py"], "reason": "read by Ada"}
    accepted = Bundle.model_validate(merge(made, {"engine": {"remote_code": exception}}))
    plain = Bundle.model_validate(merge(made, {"files": [file for file in made["files"] if file["role"] != "code"]}))
    differing = {name for name, digest in accepted.components().items() if plain.components()[name] != digest}
    assert differing == {"engine"}
    with pytest.raises(ValidationError, match=r"engine.remote_code.files: other.py is not among the files"):
        Bundle.model_validate(merge(made, {"engine": {"remote_code": exception | {"files": ["other.py"]}}}))


def split(number: int, tensors: int = 36) -> dict[str, int | float]:
    return {"split.no": number, "split.count": 3, "split.tensors.count": tensors}


def test_shards_that_are_not_all_there_are_refused(tmp_path):
    directory = tmp_path / "shards"
    directory.mkdir()
    for number in (0, 2):
        write_chain(directory / f"m-0000{number + 1}-of-00003.gguf", metadata=split(number))
    assert "not one complete set" in refused(directory)
    second = write_chain(directory / "m-00002-of-00003.gguf", metadata=split(1))
    assert document(directory)["model"]["architecture"] == "llama"
    write_chain(second, metadata=split(1, tensors=37))
    assert "with 36 tensors, and they say that there are 36 or 37" in refused(directory)
    write_chain(second, metadata=split(1))
    second.rename(directory / "m-00004-of-00003.gguf")
    assert "does not find it under this name" in refused(directory)


def test_an_index_and_its_shards_must_agree(hub):
    (hub / "model-00002-of-00002.safetensors").rename(hub / "extra.safetensors")
    said = refused(hub, VLLM)
    assert "names the shard model-00002-of-00002.safetensors, which is not beside it" in said
    assert "extra.safetensors: is not named by model.safetensors.index.json" in said


def test_a_directory_without_weights_or_with_several_templates_is_refused(tmp_path, chain):
    (tmp_path / "README.md").write_text("x")
    shutil.rmtree(chain)
    assert "holds no weights" in refused(tmp_path)
    directory = write_bundle_directory(tmp_path / "two", template=None)
    (directory / "a.jinja").write_text("a")
    (directory / "b.jinja").write_text("b")
    assert "several templates: a.jinja, b.jinja" in refused(directory)


# Source of the cases: RFC 7396, appendix A.
@pytest.mark.parametrize(
    ("document", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_what_a_person_adds_is_merged_as_the_standard_says(document, patch, expected):
    assert merge(document, patch) == expected
