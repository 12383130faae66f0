"""Every inferred value says where it came from, and it is there."""

import pytest

from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import infer
from tests.support import chain
from tests.support.checkpoints import micro, speak, write_json
from tests.support.families import FAMILIES
from tests.support.published import write

VLLM = {"engine": {"name": "vllm", "version": "0.32.0", "arguments": ["--max-model-len", "64"]}}


def leaves(value, place=""):
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{place}/{key}")
    elif value not in (None, [], {}):
        yield place, value


def without_origin(told):
    said = told["from"]
    rest = {key: one for key, one in told.items() if key != "from"}
    return [p for p, _ in leaves(rest) if not any(p == one or p.startswith(one + "/") for one in said)]


def at(document, pointer):
    for key in pointer.split("/")[1:]:
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def inferred(root, declared=None):
    composition = of_directory(root, read_declared(declared or {}))
    return composition, infer(composition)


FEW = ("llama-3.2-1b-instruct", "qwen2.5-7b-awq", "gemma-3-4b-it", "deepseek-v2-lite-chat", "gpt-oss-20b")
"""Tied head, a quantization, an inner configuration, latents, alternating layers."""


@pytest.mark.parametrize("family", FEW)
def test_what_published_files_tell_is_where_it_is_said_to_be(tmp_path, family):
    composition, told = inferred(write(tmp_path / "m", FAMILIES[family]), VLLM)
    assert without_origin(told) == []
    for place, origin in told["from"].items():
        if place.startswith(("/shape/", "/sampling/", "/rope/")) and origin["by"] == "file":
            document = composition.model.object(origin["file"])
            assert at(document, origin["pointer"]) == at(told, place), place


def test_what_a_header_tells_is_named_by_its_key(tmp_path):
    composition, told = inferred(chain.write_bundle_directory(tmp_path / "m"))
    assert without_origin(told) == []
    assert told["from"]["/architecture"] == {"by": "file", "file": "model.gguf", "pointer": "general.architecture"}
    assert told["from"]["/template"] == {"by": "file", "file": "chat_template.jinja"}
    assert told["from"]["/engine/name"]["by"] == "derived"
    metadata = composition.model.gguf.metadata
    for place, origin in told["from"].items():
        if (
            place.startswith(("/shape/", "/context/derived"))
            and "." in origin["pointer"]
            and "weight" not in str(origin)
        ):
            assert metadata[origin["pointer"]] == at(told, place)


def test_a_value_of_no_file_is_not_said_to_be_in_one(tmp_path):
    root = speak(micro(tmp_path / "m", num_key_value_heads=None, head_dim=None))
    write_json(root / "generation_config.json", {"temperature": 0.5, "top_k": 7, "eos_token_id": [2, 4]})
    override = ["--max-model-len", "64", "--override-generation-config", '{"top_k": 9}']
    _, told = inferred(root, {"engine": {"name": "vllm", "version": "0.32.0", "arguments": override}})
    said = told["from"]
    assert {said[f"/shape/{name}"]["by"] for name in ("kv_heads", "head_dim")} == {"derived"}
    assert said["/shape/heads"] == {"by": "file", "file": "config.json", "pointer": "/num_attention_heads"}
    assert said["/context/requested"] == {"by": "argument", "pointer": "--max-model-len"}
    assert said["/engine/version"] == {"by": "declared", "pointer": "/engine/version"}
    assert said["/sampling/temperature"]["file"] == "generation_config.json"
    assert said["/sampling/top_k"] == {"by": "argument", "pointer": "--override-generation-config"}
    assert said["/sampling/top_p"] == {"by": "default"}
    # an engine that reads stop ids there and nothing else
    _, told = inferred(root, {"engine": {"name": "vllm", "version": "0.7.3"}})
    assert told["sampling"]["temperature"] == 1.0
    assert told["from"]["/sampling/temperature"] == {"by": "default"}
