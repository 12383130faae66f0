"""Files that say anything at all are judged, never a defect of the judge."""

import copy
import json
import random

import pytest

from tests.support.checkpoints import (
    adapt,
    adapt_config,
    micro,
    micro_config,
    micro_sharded,
    speak,
    tok,
    validate,
    write_json,
)

JUNK = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**70,
    1.5,
    -0.0,
    1e300,
    "",
    "x",
    "null",
    "\ud800",
    [],
    [None],
    [[1]],
    {},
    {"a": {}},
    "a" * 999,
)
NESTED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "actorder": None}}},
        "ignore": ["lm_head", "re:.*x"],
        "weight_block_size": [128, 128],
    },
    "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000}},
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "text_config": {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "auto_map": {"AutoModel": "a.B"},
}
ASKED = {
    "engine": {
        "name": "vllm",
        "version": "0.32.0",
        "arguments": ["--lora-target-modules", "q_proj", "--max-model-len", "64"],
    },
    "topology": {"tp": 2, "pp": 2, "ep": 2},
    "hardware": {"accelerator": "sm_86"},
    "adapters": {"adpt": "adapt"},
    "draft": "draft",
    "serving": {"features": ["chat"]},
}


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:30]:
        yield from places(inner, (*path, key))


def mutated(value, chance):
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(list(places(value)))
        if not path:
            continue
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = copy.deepcopy(chance.choice(JUNK))
    return value


def documents(root):
    tokenizer = tok(bos=True)
    tokenizer["model"]["vocab"] = dict(list(tokenizer["model"]["vocab"].items())[:12])
    special = {"additional_special_tokens": ["<|a|>"], "eos_token": {"content": "</s>"}}
    decoder = {"4": {"content": "<|im_end|>", "special": True}}
    return {
        "config.json": micro_config(**NESTED),
        "generation_config.json": {"eos_token_id": [2, 4], "temperature": 0.6, "top_k": 20, "do_sample": True},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "added_tokens_decoder": decoder,
            "chat_template": [{"name": "default"}],
        },
        "special_tokens_map.json": special,
        "added_tokens.json": {"<|b|>": 300},
        "params.json": {"dim": 8},
        "hf_quant_config.json": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "model.safetensors.index.json": json.loads((root / "model.safetensors.index.json").read_text()),
        "adapt/adapter_config.json": adapt_config(rank_pattern={"q_proj": 4}),
        "draft/config.json": micro_config(),
    }


@pytest.mark.parametrize("seed", range(8))
def test_no_value_anywhere_makes_the_judge_fail(tmp_path, seed):
    chance = random.Random(seed)
    root = micro_sharded(tmp_path / "m")
    adapt(root / "adapt")
    speak(micro(root / "draft"), template=None)
    sound = documents(root)
    for name, value in sound.items():
        write_json(root / name, value)
    for _ in range(20):
        name = chance.choice(list(sound))
        write_json(root / name, mutated(sound[name], chance))
        found = validate(root, ASKED)
        assert found.verdict in {"passed", "failed"}
        assert json.dumps([one.as_json() for one in found.flaws] + [found.inferred])
        write_json(root / name, sound[name])
