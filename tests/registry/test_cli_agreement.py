"""`bundle validate` and `bundle create` say the same of the same folder: what blocks, in its words, and what warns."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chain import write_chain
from tests.support.checkpoints import T0, micro, micro_sharded, micro_tensors, speak, write_json

VLLM = ("--engine", "vllm", "--engine-version", "0.32.0")
LLAMACPP = ("--engine", "llamacpp", "--engine-version", "1.0")
IMAGE = ("--engine-image", "serve@sha256:" + "e" * 64, "--name", "m")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}" + T0


def words(template: str | None = T0, **config: object) -> Callable[[Path], Path]:
    return lambda root: speak(micro(root), template=template, config=config)


def generating(**told: object) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        write_json(speak(micro(root)) / "generation_config.json", told)
        return root

    return write


def cut(name: str, drop: int, make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        place = make(root) / name
        place.write_bytes(place.read_bytes()[:-drop])
        return root

    return write


def without(name: str, make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        (make(root) / name).unlink()
        return root

    return write


def chain(**told: object) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        root.mkdir()
        write_chain(root / "model.gguf", **told)  # type: ignore[arg-type]
        return root

    return write


FOLDERS: dict[str, tuple[tuple[str, ...], Callable[[Path], Path]]] = {
    "sound": (VLLM, words()),
    "sound gguf": (LLAMACPP, chain()),
    "no template": (VLLM, words(None)),
    "no template in a gguf": (LLAMACPP, chain(template=None)),
    "no template in a gguf for vllm": (VLLM, chain(template=None)),
    "broken template": (VLLM, words("{% for %}")),
    "a template that refuses": (VLLM, words("{{ raise_exception('no') }}")),
    "no turn of the assistant": (VLLM, words(T0.split("{% if add_generation_prompt")[0])),
    "a clock in the template": (VLLM, words("{{ strftime_now('%d') }}" + T0)),
    "no system role": (VLLM, words(NO_SYSTEM)),
    "broken template of a gguf": (LLAMACPP, chain(template="{% for %}")),
    "no head": (VLLM, lambda root: speak(micro(root, tensors=micro_tensors()[:11]))),
    "no head in a gguf": (LLAMACPP, chain(headless=True)),
    "bad temperature": (VLLM, generating(temperature=-1, eos_token_id=[2, 4])),
    "no such stop": (VLLM, generating(eos_token_id=[999_999])),
    "bad sampling of a gguf": (LLAMACPP, chain(metadata={"general.sampling.top_p": 1.5})),
    "cut weights": (VLLM, cut("model.safetensors", 64, words())),
    "cut gguf": (LLAMACPP, cut("model.gguf", 64, chain())),
    "no tokenizer": (VLLM, without("tokenizer.json", words())),
    "no configuration": (VLLM, without("config.json", words())),
    "a missing shard": (VLLM, lambda root: _less(micro_sharded(root))),
    "unknown argument": ((*VLLM, "--arg", "--max-modle-len", "--arg", "64"), words()),
    "too long a context": ((*VLLM, "--arg", "--max-model-len", "--arg", "100000"), words()),
    "pooled gguf": (LLAMACPP, chain(template=None, metadata={"qwen3.pooling_type": 3})),
}


UNSAID = {"no tokenizer", "no template", "no template in a gguf for vllm"}
"""What these serve has to be said to validate: of files for other engines than llama.cpp it supposes nothing."""


def _less(root: Path) -> Path:
    min(speak(root).glob("*.safetensors")).unlink()
    return root


@pytest.mark.parametrize("name", FOLDERS)
def test_both_commands_say_the_same_of_a_folder(name, command, tmp_path):
    options, make = FOLDERS[name]
    root = make(tmp_path / "m")
    if name in UNSAID:
        told = tmp_path / "told.json"
        told.write_text('{"serving": {"features": ["chat"]}}')
        options = (*options, "-f", str(told))
    told = command("bundle", "validate", root, *options, "--json")
    found = json.loads(told.out)["findings"]
    blocking = [(one["code"], one["message"]) for one in found if one["severity"] == "block"]
    assert told.status == (1 if blocking else 0)
    made = command("bundle", "create", root, *options, *IMAGE, "--dry-run")
    if made.status != 0:
        # What cannot even be read as one bundle is refused, and then validate finds what blocks.
        assert made.status == 2, made.err
        assert blocking, made.err
        return
    head, *_ = made.err.partition("the gate static will")
    said = [tuple(line.split(": ", 1)) for line in head.splitlines() if re.match(r"[a-z]+(-[a-z]+)+: ", line)]
    assert said == blocking[:10]
    assert ("the gate static will fail" in made.err) == bool(blocking)
    warned = re.search(r"the gate static will warn: ([a-z0-9, -]+);", made.err)
    assert (warned[1].split(", ") if warned else []) == sorted({o["code"] for o in found if o["severity"] == "warn"})
