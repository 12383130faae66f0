# ruff: noqa: E501 - a family is a few lines
import pytest

from gates.files.contents import Reader, Selection, role_of, select
from gates.files.remote_code import refuse_code, told, trusts
from gates.static.rules import implemented
from schemas.bundle import Role

HUB = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
SHARDED = [*SHARDS, "model.safetensors.index.json"]
ABOUT = ["README.md", "LICENSE", "USE_POLICY.md"]


def chosen(paths: list[str], engine: str = "vllm", arguments: tuple[str, ...] = (), **options) -> Selection:
    found = select(paths, Reader(engine, arguments, options.pop("weights", None), **options))
    named = [*found.kept, *(one.path for one in found.left_out)]
    assert len(named) == len(set(named))
    assert set(paths) == {*named, *(refused.file for refused in found.refused if refused.file)}
    return found


def codes(found: Selection) -> list[tuple[str, str | None]]:
    return [(refused.code, refused.file) for refused in found.refused]


def left_out(found: Selection) -> dict[str, str]:
    return {one.path: one.code for one in found.left_out}


# Further files of published repositories, by family, and the reason for which each is left out.
PUBLISHED = {
    "Llama 3.1": (
        [*HUB, *ABOUT, *SHARDED],
        {
            "original/consolidated.00.pth": "pickled",
            "original/params.json": "elsewhere",
            "original/tokenizer.model": "elsewhere",
        },
    ),
    "Mistral 7B": (
        [*HUB, *SHARDED, "README.md", "tokenizer.model", "tokenizer.model.v3", "params.json"],
        {"consolidated.safetensors": "duplicate-weights"},
    ),
    "Mixtral": (
        [*HUB, *SHARDED, "README.md", "tokenizer.model"],
        {f"consolidated.0{n}.pt": "pickled" for n in range(2)} | {"RELEASE": "unknown"},
    ),
    "Gemma 2": ([*HUB, *SHARDED, "README.md", "tokenizer.model"], {".gitattributes": "unknown"}),
    "Qwen 2.5": ([*HUB, *SHARDED, "README.md", "LICENSE", "merges.txt", "vocab.json"], {}),
    "Qwen": (
        [*HUB, *SHARDED, "README.md", "LICENSE", "NOTICE", "qwen.tiktoken"],
        {
            "assets/logo.jpg": "media",
            "configuration_qwen.py": "code",
            "modeling_qwen.py": "code",
            "cpp_kernels.py": "code",
            "cache_autogptq_cuda_256.cpp": "code",
            "cache_autogptq_cuda_kernel_256.cu": "code",
        },
    ),
    "DeepSeek V3": (
        ["config.json", "tokenizer.json", "tokenizer_config.json", *SHARDED, "README.md", "LICENSE-CODE", "LICENSE-MODEL"],
        {
            "configuration_deepseek.py": "code",
            "modeling_deepseek.py": "code",
            "inference/configs/config_671B.json": "unknown",
            "inference/convert.py": "code",
            "inference/requirements.txt": "unknown",
            "figures/benchmark.png": "media",
            "README_WEIGHTS.md": None,
        },
    ),
    "gpt-oss": (
        [*HUB[:4], "special_tokens_map.json", *SHARDED, "README.md", "LICENSE", "USAGE_POLICY", "chat_template.jinja"],
        {
            "metal/model.bin": "pickled",
            "original/config.json": "elsewhere",
            "original/dtypes.json": "unknown",
            "original/model.safetensors": "elsewhere",
        },
    ),
    "Phi 3.5": (
        [*HUB, *SHARDED, "README.md", "LICENSE", "NOTICE.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "added_tokens.json"],
        {"configuration_phi3.py": "code", "modeling_phi3.py": "code", "sample_finetune.py": "code", "data_summary_card.md": None},
    ),
    "GPT-2": (
        ["config.json", "generation_config.json", "merges.txt", "vocab.json", "tokenizer.json", "model.safetensors", "README.md"],
        {
            "64.tflite": "other-format",
            "64-8bits.tflite": "other-format",
            "flax_model.msgpack": "other-format",
            "onnx/decoder_model.onnx": "other-format",
            "onnx/config.json": "elsewhere",
            "pytorch_model.bin": "pickled",
            "rust_model.ot": "other-format",
            "tf_model.h5": "other-format",
        },
    ),
    "an embedding model": (
        [*HUB[:1], "tokenizer.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "vocab.txt"],
        {"openvino/openvino_model.bin": "pickled", "openvino/openvino_model.xml": "other-format", "train_script.py": "code"},
    ),
    "a fine-tuned one": (
        [*HUB, "model.safetensors", "README.md", "chat_template.jinja"],
        {
            "training_args.bin": "of-training",
            "optimizer.pt": "of-training",
            "runs/events.out.tfevents.1": "unknown",
            "trainer_state.json": "unknown",
            "notebook.ipynb": "code",
            "图片 1.png": "media",
        },
    ),
    "pixel and text": (
        [*HUB, *SHARDED, "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json", "processor_config.json"],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_sound_repositories_hold_raises_nothing(family):
    kept, further = PUBLISHED[family]
    documents = [path for path, code in further.items() if code is None]
    names = [path for path in kept if path != "USAGE_POLICY"] + documents
    found = chosen([*kept, *further])
    assert codes(found) == []
    assert sorted(found.kept) == sorted(names)
    unnamed = {path: "unknown" for path in kept if path not in names}
    assert left_out(found) == {path: code for path, code in further.items() if code} | unnamed


GGUF = [f"model-{kind}.gguf" for kind in ("Q4_K_M", "Q8_0", "IQ2_XXS", "F16")]


def test_one_quantization_of_many_is_taken_when_it_is_named():
    found = chosen([*GGUF, "README.md", "imatrix.gguf", "model.imatrix"], "llamacpp", weights="q4_k_m")
    assert codes(found) == []
    assert found.kept == {"model-Q4_K_M.gguf": Role.WEIGHTS, "README.md": Role.DOCUMENTATION}
    assert left_out(found) == dict.fromkeys(sorted(set(GGUF) - {"model-Q4_K_M.gguf"}), "other-quantization") | {
        "imatrix.gguf": "other-format",
        "model.imatrix": "other-format",
    }


@pytest.mark.parametrize("pattern", ["Q8_0", "q8_0", "model-Q8_0.gguf", "*Q8*"])
def test_a_quantization_is_named_by_word_or_pattern(pattern):
    assert [*chosen(GGUF, "llamacpp", weights=pattern).kept] == ["model-Q8_0.gguf"]


def test_a_word_is_a_whole_word():
    found = chosen(["model-Q4_K_M.gguf", "model-Q4_K.gguf"], "llamacpp", weights="q4_k")
    assert [*found.kept] == ["model-Q4_K.gguf"]


def test_several_quantizations_without_a_choice_are_refused_with_their_names():
    (refused,) = chosen(GGUF, "llamacpp").refused
    assert refused.code == "weights-ambiguous"
    assert "model-Q8_0.gguf" in refused.message
    assert "--weights" in (refused.advice or "")
    (refused,) = chosen(GGUF, "llamacpp", weights="q5_k_m").refused
    assert refused.code == "weights-unmatched"


def test_the_shards_of_one_quantization_are_one_set_in_a_folder_too():
    shards = [f"Q4_K_M/big-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    found = chosen([*shards, "Q8_0/big-Q8_0-00001-of-00001.gguf"], "llamacpp", weights="q4_k_m")
    assert sorted(found.kept) == shards


def test_an_engine_gets_one_format():
    paths = [*HUB, "model.safetensors", "model-Q4_K_M.gguf", "pytorch_model.bin"]
    assert left_out(chosen(paths, "vllm")) == {"model-Q4_K_M.gguf": "other-format", "pytorch_model.bin": "pickled"}
    found = chosen(paths, "llamacpp")
    assert [*found.kept] == ["model-Q4_K_M.gguf"]
    assert left_out(found)["model.safetensors"] == "other-format"
    assert left_out(found)["config.json"] == "unread"


def test_safetensors_are_preferred_and_gguf_is_taken_when_chosen():
    paths = ["config.json", "model.safetensors", "model-Q4_K_M.gguf"]
    assert sorted(chosen(paths, "sglang", weights="q4_k_m").kept) == ["config.json", "model-Q4_K_M.gguf"]
    assert sorted(chosen(["config.json", "model-Q4_K_M.gguf"]).kept) == ["config.json", "model-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    "arguments", [("--load-format", "mistral"), ("--config-format=mistral",), ("--load_format", "mistral")]
)
def test_the_copy_that_the_engine_is_told_to_read_is_the_one(arguments):
    paths = [*SHARDED, "consolidated.safetensors", "params.json"]
    assert "consolidated.safetensors" in chosen(paths, arguments=arguments).kept
    assert SHARDS[0] not in chosen(paths, arguments=arguments).kept
    assert "consolidated.safetensors" in chosen(["consolidated.safetensors", "params.json"]).kept


def test_shards_may_have_any_name_where_there_is_an_index():
    paths = [
        *("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"),
        *("model-overlay-00001.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"),
        *("model.safetensors.index.fp16.json",),
    ]
    found = chosen([*paths, "model.safetensors"])
    assert left_out(found) == {
        "model.fp16.safetensors": "duplicate-weights",
        "model.safetensors.index.fp16.json": "duplicate-weights",
    }


def test_without_an_index_the_files_called_model_are_the_model():
    found = chosen(["config.json", "model.safetensors", "model.fp16.safetensors", "vae.safetensors"])
    assert left_out(found) == {"model.fp16.safetensors": "duplicate-weights", "vae.safetensors": "duplicate-weights"}
    assert codes(chosen(["a.safetensors", "b.safetensors"])) == [("weights-ambiguous", "")]


@pytest.mark.parametrize(
    ("paths", "engine", "expected"),
    [
        (["config.json", "pytorch_model.bin"], "vllm", [("pickle-weights", "")]),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "sglang", [("pickle-weights", "")]),
        (["consolidated.00.pth", "params.json"], "vllm", [("pickle-weights", "")]),
        (["model.pkl"], "llamacpp", [("pickle-weights", "")]),
        (["model.onnx"], "vllm", [("weights-missing", "")]),
        (["config.json"], "vllm", [("weights-missing", "")]),
        (["config.json", "model.safetensors"], "llamacpp", [("weights-unreadable", "")]),
        (["model.gguf"], "tgi", [("weights-unreadable", "")]),
        ([], "vllm", [("weights-missing", "")]),
    ],
)
def test_weights_that_no_engine_may_load_are_refused(paths, engine, expected):
    assert codes(chosen(paths, engine)) == expected


@pytest.mark.parametrize("load_format", ["pt", "bin", "npcache"])
def test_an_engine_that_is_told_to_load_pickled_weights_is_refused(load_format):
    found = chosen(["model.safetensors", "pytorch_model.bin"], arguments=("--load-format", load_format))
    assert codes(found) == [("pickle-weights", "")]


def test_an_adapter_that_is_only_pickled_is_refused_and_one_that_is_both_is_not():
    paths = ["model.safetensors", "lora/adapter_config.json", "lora/adapter_model.bin"]
    assert codes(chosen(paths)) == [("pickle-weights", "lora/adapter_model.bin")]
    both = chosen([*paths, "lora/adapter_model.safetensors"])
    assert codes(both) == []
    assert both.kept["lora/adapter_model.safetensors"] is Role.ADAPTER


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("weights.zip", "archive"),
        ("model.tar.gz", "archive"),
        ("sub/data.7z", "archive"),
        ("flash_attn.whl", "archive"),
        ("libkernel.so", "program"),
        ("libkernel.so.1", "program"),
        ("kernel.dll", "program"),
        ("Run.EXE", "program"),
        ("model.llamafile", "program"),
    ],
)
def test_archives_and_programs_are_refused_wherever_they_lie(path, code):
    found = chosen(["model.safetensors", path])
    assert codes(found) == [(code, path)]
    assert "--exclude" in (found.refused[0].advice or "")


def test_a_role_takes_a_file_but_never_a_pickled_one():
    paths = ["model.safetensors", "words.xyz", "old.bin"]
    found = select(
        paths, Reader("vllm"), {"words.xyz": Role.TOKENIZER, "old.bin": Role.WEIGHTS, "not.there": Role.CONFIG}
    )
    assert found.kept["words.xyz"] is Role.TOKENIZER
    assert codes(found) == [("role-without-file", "not.there"), ("pickle-weights", "old.bin")]


def test_weights_that_a_person_names_are_the_only_ones():
    found = select(["a.gguf", "b.gguf"], Reader("llamacpp"), {"b.gguf": Role.WEIGHTS})
    assert found.kept == {"b.gguf": Role.WEIGHTS}
    assert left_out(found) == {"a.gguf": "other-format"}


def test_one_precision_of_a_projector_is_taken():
    projectors = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"]
    found = chosen([*projectors, "model-Q4_K_M.gguf"], "llamacpp")
    assert found.kept["mmproj-F16.gguf"] is Role.PROCESSOR
    assert left_out(found) == {"mmproj-BF16.gguf": "other-quantization", "mmproj-F32.gguf": "other-quantization"}


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("tokenizer.model", Role.TOKENIZER),
        ("tokenizer.model.v3", Role.TOKENIZER),
        ("tokenizer.model.v7m1", Role.TOKENIZER),
        ("spiece.model", Role.TOKENIZER),
        ("sentencepiece.bpe.model", Role.TOKENIZER),
        ("qwen.tiktoken", Role.TOKENIZER),
        ("tiktoken.model", Role.TOKENIZER),
        ("tekken.json", Role.TOKENIZER),
        ("params.json", Role.CONFIG),
        ("additional_chat_templates/tool_use.jinja", Role.TEMPLATE),
        ("evil.model", None),
    ],
)
def test_names_tell_roles(path, role):
    assert role_of(path) is role


# --------------------------------------------------------------------------------------------------- remote code

AUTO_MAP = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}


def refused_code(config: dict, *, trusted: bool = False, accepted: tuple[str, ...] = (), file: str = "config.json"):
    types = {"": config["model_type"]} if "model_type" in config else {}
    found = refuse_code(
        {file: told(config)}, model_types=types, is_trusted=trusted, accepted=accepted, own=implemented(None, None)
    )
    return [(one.code, one.file, one.pointer, one.found) for one in found]


def test_code_that_an_engine_would_run_is_refused():
    config = {"model_type": "llama", "auto_map": AUTO_MAP}
    assert [one[:3] for one in refused_code(config)] == [("remote-code", "config.json", "/auto_map")] * 2
    assert len(refused_code(config, trusted=True)) == 3
    assert len(refused_code(config, trusted=True, accepted=("modeling_x.py",))) == 1
    assert refused_code(config, trusted=True, accepted=("configuration_x.py", "modeling_x.py")) == []


def test_a_family_that_engines_implement_themselves_runs_no_code_until_it_is_trusted():
    for model_type in ("deepseek_v3", "phi3", "qwen", "internlm2", "kimi_k2"):
        config = {"model_type": model_type, "auto_map": AUTO_MAP}
        assert refused_code(config) == []
        assert len(refused_code(config, trusted=True)) == 3


def test_trust_alone_is_refused_where_nobody_names_the_code():
    assert refused_code({"model_type": "llama"}, trusted=True) == [("remote-code", "", None, "trust remote code")]
    assert refused_code({"model_type": "llama"}) == []


def test_code_of_another_repository_is_refused_even_when_files_are_accepted():
    config = {"auto_map": {"AutoModel": "other/repo--modeling_x.X"}}
    for trusted, accepted in ((False, ()), (True, ("modeling_x.py",))):
        (found,) = refused_code(config, trusted=trusted, accepted=accepted)
        assert found[3] == "other/repo--modeling_x.X"


def test_a_tokenizer_brings_code_as_a_model_does():
    config = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (found,) = refused_code(config, file="tokenizer_config.json")
    assert found[:3] == ("remote-code", "tokenizer_config.json", "/auto_map")


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"_attn_implementation": "a/b"}, "/_attn_implementation"),
        ({"_attn_implementation_internal": "kernels-community/x"}, "/_attn_implementation_internal"),
        ({"text_config": {"attn_implementation": "a/b:f"}}, "/text_config/attn_implementation"),
        ({"attn_implementation": {"text": "sdpa", "vision": "a/b"}}, "/attn_implementation"),
        ({"trust_remote_code": True}, "/trust_remote_code"),
        ({"parts": [{"trust_remote_code": "yes"}]}, "/parts/0/trust_remote_code"),
    ],
)
def test_fields_that_make_a_loader_fetch_code_are_refused_for_any_family(config, place):
    for model_type in ("llama", "deepseek_v3"):
        (found,) = refused_code({**config, "model_type": model_type})
        assert found[:3] == ("remote-code", "config.json", place)


def test_fields_of_published_configurations_are_no_code():
    config = {
        "_attn_implementation": "flash_attention_2",
        "_attn_implementation_autoset": True,
        "_name_or_path": "meta-llama/Llama-3.1-8B",
        "trust_remote_code": False,
        "auto_map": None,
        "attn_implementation": None,
    }
    assert refused_code(config) == []


@pytest.mark.parametrize(
    ("arguments", "variables", "trusted"),
    [
        (["--trust-remote-code"], {}, True),
        (["--trust_remote_code"], {}, True),
        (["--trust-remote-code=true"], {}, True),
        (["--trust-remote"], {}, True),
        (["--tru"], {}, True),
        (["--trust_remote=yes"], {}, True),
        (["--trust-remote=False"], {}, False),
        (["--trust-region", "--tr"], {}, False),
        (["--trust-remote-code=False"], {}, False),
        (["--tokenizer-mode", "auto"], {}, False),
        ([], {"TRUST_REMOTE_CODE": "true"}, True),
        ([], {"VLLM_TRUST_REMOTE_CODE": "1"}, True),
        ([], {"TRUST_REMOTE_CODE": "0"}, False),
        ([], None, False),
    ],
)
def test_an_engine_is_told_to_trust_in_several_ways(arguments, variables, trusted):
    assert trusts(arguments, variables) is trusted
