"""What a bundle takes and what could run is judged alike by `bundle create`, by `bundle validate` and by the gate."""

import json

import pytest

from gates.directory import DirectoryRefused, read_directory
from gates.inference import EngineChoice, bundle_document
from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import examine
from tests.support.checkpoints import micro

JUDGED = {"pickle-weights", "archive", "program", "remote-code", "launch-refused"}
AUTO_MAP = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
CODE = {"modeling_x.py": b"print()"}
TRUST = ("--trust-remote-code",)
ADAPTER = {"adapter_config.json": b'{"r": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}'}


def model(config=None, weights=True, arguments=(), version="0.32.0", engine="vllm", code=(), **files):
    return {
        "config": config or {},
        "weights": weights,
        "arguments": arguments,
        "version": version,
        "engine": engine,
        "code": code,
        "files": {name.replace("__", "/"): content for name, content in files.items()},
    }


LAYOUTS = {
    "sound": (model(), set()),
    "pickled beside": (model(**{"pytorch_model.bin": b"\x80\x04"}), set()),
    "pickled alone": (model(weights=False, **{"pytorch_model.bin": b"\x80\x04"}), {"pickle-weights"}),
    "pickled shards alone": (
        model(weights=False, **{f"pytorch_model-0000{n}-of-00002.bin": b"\x80\x04" for n in (1, 2)}),
        {"pickle-weights"},
    ),
    "checkpoint of a trainer beside": (model(**{"training_args.bin": b"PK", "optimizer.pt": b"PK"}), set()),
    "pickles asked for": (model(arguments=("--load-format", "pt"), **{"a.bin": b"\x80"}), {"pickle-weights"}),
    "pickles asked for by =": (model(arguments=("--load-format=npcache",)), {"pickle-weights"}),
    "an adapter that is pickled": (
        model(**{"lora__adapter_config.json": ADAPTER["adapter_config.json"], "lora__adapter_model.bin": b"PK"}),
        {"pickle-weights"},
    ),
    "an original folder": (model(**{"original__consolidated.00.pth": b"PK", "original__params.json": b"{}"}), set()),
    "an archive": (model(**{"more.zip": b"PK"}), {"archive"}),
    "an archive in a folder": (model(**{"src__ops.tar.gz": b"PK"}), {"archive"}),
    "a wheel": (model(**{"ops-1.0-py3-none-any.whl": b"PK"}), {"archive"}),
    "a library": (model(**{"ops.so": b"\x7fELF"}), {"program"}),
    "a versioned library": (model(**{"libops.so.1": b"\x7fELF"}), {"program"}),
    "a program": (model(**{"run.exe": b"MZ"}), {"program"}),
    "code that nothing names": (model(**CODE, **{"convert.sh": b"ls"}), set()),
    "auto_map": (model({"model_type": "own", "auto_map": AUTO_MAP}, **CODE), {"remote-code"}),
    "auto_map without its file": (model({"model_type": "own", "auto_map": AUTO_MAP}), {"remote-code"}),
    "auto_map of a family of the engine's": (model({"model_type": "stablelm", "auto_map": AUTO_MAP}, **CODE), set()),
    "auto_map of a later family": (
        model({"model_type": "kimi_k2", "auto_map": AUTO_MAP}, version="0.9.2", **CODE),
        {"remote-code"},
    ),
    "auto_map of a later family in a later version": (
        model({"model_type": "kimi_k2", "auto_map": AUTO_MAP}, version="0.11.0", **CODE),
        set(),
    ),
    "auto_map of a family of another engine": (
        model({"model_type": "kimi_k2", "auto_map": AUTO_MAP}, engine="tgi", version="3.3.6", **CODE),
        {"remote-code"},
    ),
    "auto_map of a family of the engine's, trusted": (
        model({"model_type": "stablelm", "auto_map": AUTO_MAP}, arguments=TRUST, **CODE),
        {"remote-code"},
    ),
    "auto_map that is accepted": (
        model({"model_type": "own", "auto_map": AUTO_MAP}, code=("modeling_x.py",), **CODE),
        set(),
    ),
    "auto_map that is accepted and trusted": (
        model({"model_type": "own", "auto_map": AUTO_MAP}, arguments=TRUST, code=("modeling_x.py",), **CODE),
        set(),
    ),
    "auto_map to another repository": (
        model({"model_type": "own", "auto_map": {"AutoModel": "o/r--modeling_x.X"}}, code=("modeling_x.py",), **CODE),
        {"remote-code"},
    ),
    "auto_map of a tokenizer": (
        model(**{"tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tok.T", None]}}).encode()}),
        {"remote-code"},
    ),
    "auto_map of a processor": (
        model(**{"preprocessor_config.json": json.dumps({"auto_map": {"AutoProcessor": "p.P"}}).encode()}),
        {"remote-code"},
    ),
    "auto_map of a processor of a family of the engine's": (
        model(
            {"model_type": "internvl_chat", "text_config": {"model_type": "qwen2"}},
            **{"preprocessor_config.json": json.dumps({"auto_map": {"AutoProcessor": "p.P"}}).encode()},
        ),
        set(),
    ),
    "a kernel by its repository": (model({"attn_implementation": "someone/kernel"}), {"remote-code"}),
    "trust in a configuration": (model({"vision": {"trust_remote_code": True}}), {"remote-code"}),
    "trust without any code": (model(arguments=TRUST), {"remote-code"}),
    "trust by the beginning of its name": (model(arguments=("--trust-remote",)), {"remote-code"}),
    "a plugin": (model(arguments=("--tool-parser-plugin", "x.py")), {"launch-refused"}),
    "a tokenizer from elsewhere": (model(arguments=("--tokenizer=o/r",), engine="vllm"), {"launch-refused"}),
    "trust that is taken back": (model(arguments=("--trust-remote-code=false",)), set()),
}  # fmt: skip


def written(root, told):
    micro(root, **{"model_type": "llama"} | told["config"])
    if not told["weights"]:
        (root / "model.safetensors").unlink()
    for name, content in told["files"].items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    return root


def by_create(root, told):
    choice = EngineChoice(told["engine"], told["version"], arguments=told["arguments"], remote_code=told["code"])
    try:
        bundle_document(read_directory(root, choice.reader()), name="m", engine=choice)
    except DirectoryRefused as refused:
        return {one.code for one in refused.refusals}
    return set()


def by_validate(root, told):
    engine = {"name": told["engine"], "version": told["version"], "arguments": list(told["arguments"])}
    if told["code"]:
        engine["remote_code"] = {"files": list(told["code"]), "reason": "read"}
    found = examine(of_directory(root, read_declared({"engine": engine})))
    return {one.code for one in found.flaws if one.severity == "block"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_refuse_the_same_for_the_same_reason(tmp_path, name):
    told, expected = LAYOUTS[name]
    root = written(tmp_path / "m", told)
    assert by_create(root, told) & JUDGED == by_validate(root, told) & JUDGED == expected
