"""The published layouts that the static gate must find nothing wrong with."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from tests.support.checkpoints import T
from tests.support.published import (
    Family,
    decoder,
    deepseek,
    experts,
    gpt_oss,
    gptq,
    nf4,
    nvfp4,
    packed_tensors,
    phi3,
    scaled,
    vision,
)

_LLAMA_TURNS = (
    "{{ bos_token }}{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}<|eot_id|>"
    "{% if tools is not none and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ first if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'system' %}[INST] {{ message['content'] }}\n\n[/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% macro kind(spec) %}{% if spec.type == 'array' %}[]{% elif spec.type == 'string' %}string"
    "{% else %}any{% endif %}"
    "{% endmacro %}{% if tools %}{% for tool in tools %}type {{ tool.function.name }} = "
    "{% for name, spec in tool.function.parameters.properties.items() %}{{ name }}: {{ kind(spec) }},{% endfor %}"
    "{% endfor %}{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}<|start|>assistant"
    "<|channel|>final<|message|>{{ message.content }}{% if loop.last and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_PHI = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_COHERE = (
    "{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>{% if message.role == 'assistant' %}"
    "<|CHATBOT_TOKEN|>{% elif message.role == 'user' %}<|USER_TOKEN|>{% else %}<|SYSTEM_TOKEN|>{% endif %}"
    "{{ message.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

_LLAMA_SPECIALS = {
    128000: "<|begin_of_text|>",
    128001: "<|end_of_text|>",
    128006: "<|start_header_id|>",
    128007: "<|end_header_id|>",
    128008: "<|eom_id|>",
    128009: "<|eot_id|>",
    128010: "<|python_tag|>",
}
_QWEN_SPECIALS = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151652: "<|vision_start|>"}
_GEMMA_SPECIALS = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"}
_MISTRAL_SPECIALS = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    6: "[AVAILABLE_TOOLS]",
    7: "[/AVAILABLE_TOOLS]",
}
_DEEPSEEK_SPECIALS = {0: "<｜begin▁of▁sentence｜>", 1: "<｜end▁of▁sentence｜>"}

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
"""The configurations as they are published; DeepSeek-V3 and Qwen3-30B-A3B with fewer layers, all else in full size."""

_LLAMA_SIZES: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "keys": 8, "inner": 14336, "rows": 128256}
_LLAMA_WORDS: dict[str, Any] = {
    "specials": _LLAMA_SPECIALS,
    "tokens": 128256,
    "template": _LLAMA_TURNS,
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "adds_bos": True,
    "generation": {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
    },
    "in_config": True,
    "expected": frozenset({"double-bos", "template-clock"}),
}
_QWEN_SIZES: dict[str, Any] = {"layers": 28, "hidden": 3584, "heads": 28, "keys": 4, "inner": 18944, "rows": 152064}
_QWEN_WORDS: dict[str, Any] = {
    "specials": _QWEN_SPECIALS,
    "tokens": 151665,
    "template": _CHATML,
    "eos": "<|im_end|>",
    "generation": {"do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "top_k": 20},
    "in_config": True,
}
_GEMMA_WORDS: dict[str, Any] = {
    "specials": _GEMMA_SPECIALS | {262144: "<image_soft_token>"},
    "tokens": 262145,
    "template": _GEMMA,
    "bos": "<bos>",
    "eos": "<eos>",
    "adds_bos": True,
    "generation": {"bos_token_id": 2, "do_sample": True, "eos_token_id": [1, 106], "pad_token_id": 0, "top_k": 64},
    "expected": frozenset({"double-bos"}),
}
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_VLLM = {"engine": {"name": "vllm", "version": "0.32.0"}}
_DEEPSEEK_WORDS: dict[str, Any] = {
    "template": _DEEPSEEK,
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "generation": {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.3, "top_p": 0.95, "do_sample": True},
    "files": {"configuration_deepseek.py": b"class DeepseekV3Config: ...\n", "modeling_deepseek.py": b"class M: ...\n"},
}
_MISTRAL_WORDS: dict[str, Any] = {
    "template": _MISTRAL,
    "bos": "<s>",
    "eos": "</s>",
    "adds_bos": True,
    "generation": {"bos_token_id": 1, "eos_token_id": 2},
    "expected": frozenset({"double-bos"}),
}
_MODELOPT = (
    b'{"producer": {"name": "modelopt", "version": "0.33"}, "quantization": {"quant_algo": "NVFP4", '
    b'"kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}}'
)


def _on(topology: int = 1, accelerator: str | None = None, engine: dict[str, Any] | None = None) -> dict[str, Any]:
    hardware = {} if accelerator is None else {"hardware": {"accelerator": accelerator, "count": topology}}
    return {"engine": engine or _VLLM["engine"], "topology": {"tensor_parallel": topology}, **hardware}


def _gemma3() -> Any:
    return chain(
        decoder(
            layers=34,
            hidden=2560,
            heads=8,
            keys=4,
            inner=10240,
            rows=262208,
            head=256,
            prefix="language_model.model.",
            head_name=None,
            norms=_GEMMA_NORMS,
            head_norms=True,
        ),
        vision("vision_tower.vision_model.", 27, 1152),
        [T("multi_modal_projector.mm_input_projection_weight", "BF16", (1152, 2560))],
    )


def _gemma_text(rows: int, *, is_third: bool, **sizes: Any) -> Any:
    return decoder(**sizes, rows=rows, head=256, head_name=None, norms=_GEMMA_NORMS, head_norms=is_third)


def _qwen_vision() -> Any:
    tower = (T(f"visual.blocks.{n}.attn.qkv.weight", "BF16", (3840, 1280)) for n in range(32))
    return chain(decoder(**_QWEN_SIZES, bias=True), tower)


def _qwen_experts() -> Any:
    feed = experts(128, 768, 2048, ("gate_proj", "up_proj", "down_proj"), "mlp.gate")
    sizes: dict[str, Any] = {"layers": 6, "hidden": 2048, "heads": 32, "keys": 4, "inner": 0, "rows": 151936}
    return decoder(**sizes, head=128, head_norms=True, feed=feed)


def _mixtral() -> Any:
    feed = experts(8, 14336, 4096, ("w1", "w3", "w2"), "block_sparse_moe.gate")
    return decoder(layers=32, hidden=4096, heads=32, keys=8, inner=0, rows=32000, feed=feed)


def _v2_lite() -> Any:
    sizes: dict[str, Any] = {"layers": 27, "hidden": 2048, "heads": 16, "rank": None, "inner": 10944}
    return deepseek(**sizes, expert=1408, count=64, shared=2, rows=102400, dense=1)


def _v3() -> Any:
    sizes: dict[str, Any] = {"layers": 5, "hidden": 7168, "heads": 128, "rank": 1536, "inner": 18432}
    wrap = scaled("weight_scale_inv", blocks=128)
    return deepseek(**sizes, expert=2048, count=256, shared=1, rows=129280, dense=3, wrap=wrap, further=1)


def _told(name: str, tensors: Any, **words: Any) -> tuple[str, Family]:
    return name, Family(CONFIGS[name], tensors, **words)


_QWEN_TOOLS = {"name": "vllm", "arguments": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}
_LONG = {"name": "vllm", "arguments": ["--max-model-len", "131072"]}
_SGLANG = {"name": "sglang", "version": "0.5.4"}

FAMILIES: dict[str, Family] = dict(
    (
        _told(
            "llama-3.1-8b-instruct",
            lambda: decoder(**_LLAMA_SIZES),
            **_LLAMA_WORDS,
            files={"original/params.json": b"{}"},
            has_whole_vocabulary=True,
        ),
        _told(
            "llama-3.2-1b-instruct",
            lambda: decoder(layers=16, hidden=2048, heads=32, keys=8, inner=8192, rows=128256, head_name=None),
            **_LLAMA_WORDS,
        ),
        _told(
            "llama-3.1-8b-fp8-dynamic",
            lambda: decoder(**_LLAMA_SIZES, wrap=scaled("weight_scale")),
            **_LLAMA_WORDS,
            declared=_on(4, "nvidia-h100"),
        ),
        _told(
            "llama-3.1-8b-w4a16",
            lambda: decoder(**_LLAMA_SIZES, wrap=packed_tensors),
            **_LLAMA_WORDS,
            declared=_on(8),
        ),
        # The last version of vLLM that reads this without a plugin, which is older than those that are started here.
        _told(
            "llama-3.1-8b-nf4",
            lambda: decoder(**_LLAMA_SIZES, wrap=nf4),
            **_LLAMA_WORDS | {"expected": _LLAMA_WORDS["expected"] | {"engine-version-untried"}},
            declared={"engine": {"name": "vllm", "version": "0.27.1"}},
        ),
        _told(
            "llama-3.1-8b-nvfp4",
            lambda: decoder(**_LLAMA_SIZES, wrap=nvfp4),
            **_LLAMA_WORDS,
            files={"hf_quant_config.json": _MODELOPT},
            declared=_on(1, "nvidia-b200"),
        ),
        _told(
            "qwen2.5-7b-instruct",
            lambda: decoder(**_QWEN_SIZES, bias=True),
            **_QWEN_WORDS,
            declared=_VLLM,
        ),
        _told(
            "qwen2.5-7b-gptq-int4",
            lambda: decoder(**_QWEN_SIZES, bias=True, dtype="F16", wrap=gptq(128)),
            **_QWEN_WORDS,
            declared=_on(4),
        ),
        _told(
            "qwen2.5-7b-awq",
            lambda: decoder(**_QWEN_SIZES, bias=True, dtype="F16", wrap=gptq(128, has_order=False, is_awq=True)),
            **_QWEN_WORDS,
            declared=_on(2),
        ),
        _told(
            "qwen3-30b-a3b",
            _qwen_experts,
            **_QWEN_WORDS,
            declared={"engine": _QWEN_TOOLS, "serving": {"features": ["chat", "streaming", "system_role", "tools"]}},
        ),
        _told("qwen2.5-vl-7b-instruct", _qwen_vision, **_QWEN_WORDS),
        _told(
            "gemma-2-9b-it",
            lambda: _gemma_text(256000, is_third=False, layers=42, hidden=3584, heads=16, keys=8, inner=14336),
            **_GEMMA_WORDS
            | {
                "specials": {0: "<pad>", 1: "<eos>", 2: "<bos>", 106: "<start_of_turn>", 107: "<end_of_turn>"},
                "tokens": 256000,
                "generation": {"bos_token_id": 2, "eos_token_id": [1, 107], "pad_token_id": 0},
            },
        ),
        _told("gemma-3-4b-it", _gemma3, **_GEMMA_WORDS, declared={"engine": _LONG}),
        _told(
            "gemma-3-1b-it",
            lambda: _gemma_text(262144, is_third=True, layers=26, hidden=1152, heads=4, keys=1, inner=6912),
            **_GEMMA_WORDS,
        ),
        _told(
            "mistral-7b-instruct-v0.3",
            lambda: decoder(layers=32, hidden=4096, heads=32, keys=8, inner=14336, rows=32768),
            **_MISTRAL_WORDS,
            specials=_MISTRAL_SPECIALS,
            tokens=32768,
            files={"params.json": b'{"dim": 4096}', "tokenizer.model.v3": b"\n\x0e\n\x05<unk>"},
            declared=_VLLM,
        ),
        _told(
            "mixtral-8x7b-instruct",
            _mixtral,
            **_MISTRAL_WORDS,
            specials={0: "<unk>", 1: "<s>", 2: "</s>"},
            tokens=32000,
            declared=_on(8),
        ),
        _told(
            "deepseek-v2-lite-chat",
            _v2_lite,
            **_DEEPSEEK_WORDS,
            specials=_DEEPSEEK_SPECIALS | {100003: "<｜User｜>", 100004: "<｜Assistant｜>"},
            tokens=100016,
        ),
        _told(
            "deepseek-v3",
            _v3,
            **_DEEPSEEK_WORDS,
            specials=_DEEPSEEK_SPECIALS | {128803: "<｜User｜>", 128804: "<｜Assistant｜>"},
            tokens=128815,
            declared=_on(16, "nvidia-h800", _SGLANG),
        ),
        _told(
            "gpt-oss-20b",
            gpt_oss,
            specials={
                199998: "<|startoftext|>",
                199999: "<|endoftext|>",
                200002: "<|return|>",
                200005: "<|channel|>",
                200006: "<|start|>",
                200007: "<|end|>",
                200008: "<|message|>",
                200012: "<|call|>",
            },
            tokens=200019,
            template=_HARMONY,
            bos="<|startoftext|>",
            eos="<|return|>",
            generation={"do_sample": True, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999},
            files={"original/config.json": b"{}", "metal/model.bin": b"\0"},
            expected=frozenset({"template-clock"}),
            declared=_VLLM,
        ),
        _told(
            "phi-3-mini-4k-instruct",
            phi3,
            specials={
                1: "<s>",
                2: "</s>",
                32000: "<|endoftext|>",
                32001: "<|assistant|>",
                32006: "<|system|>",
                32007: "<|end|>",
                32010: "<|user|>",
            },
            tokens=32011,
            template=_PHI,
            bos="<s>",
            eos="<|endoftext|>",
            generation={"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000},
            files={"configuration_phi3.py": b"class Phi3Config: ...\n", "sample_finetune.py": b"print()\n"},
            declared=_VLLM,
        ),
        _told(
            "command-r7b",
            lambda: decoder(
                layers=32,
                hidden=4096,
                heads=32,
                keys=8,
                inner=14336,
                rows=256000,
                head_name=None,
                norms=("input_layernorm",),
            ),
            specials={
                0: "<PAD>",
                5: "<BOS_TOKEN>",
                255000: "<|START_OF_TURN_TOKEN|>",
                255001: "<|END_OF_TURN_TOKEN|>",
                255006: "<|USER_TOKEN|>",
                255007: "<|CHATBOT_TOKEN|>",
                255008: "<|SYSTEM_TOKEN|>",
            },
            tokens=255033,
            template=_COHERE,
            bos="<BOS_TOKEN>",
            eos="<|END_OF_TURN_TOKEN|>",
            adds_bos=True,
            generation={"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
            expected=frozenset({"double-bos"}),
        ),
    )
)
