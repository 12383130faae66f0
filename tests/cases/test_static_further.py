"""Further neighbours of the incident cases, by other families, engines and forms of the same file, with sound ones."""

import struct

import pytest

from gates.static.declared import DeclaredError
from tests.support import chain
from tests.support.checkpoints import (
    T0,
    WIDTHS,
    T,
    adapt,
    alarms,
    codes,
    edit_json,
    micro,
    micro_config,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
    write_safetensors,
)
from tests.support.layouts import tensors_of, write_layout

VLLM, SGLANG = {"name": "vllm", "version": "0.32.0"}, {"name": "sglang", "version": "0.5.15"}
TRTLLM, LLAMACPP = {"name": "trtllm", "version": "1.2.0"}, {"name": "llamacpp", "version": "2026.10.11549"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"
EOS = {"eos_token_id": [2, 4]}


def config_only(root, **changes):
    root.mkdir(parents=True)
    write_json(root / "config.json", {key: value for key, value in changes.items() if value is not None})
    return root


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("text", [b"\xef\xbb\xbf" + POINTER, POINTER + b"\0" * 4000, POINTER + b" " * 100_000])
def test_c001_a_pointer_that_somebody_padded_is_one(tmp_path, text):
    root = micro(tmp_path / "m")
    (root / "model.safetensors").write_bytes(text)
    flaw = only(validate(root), "lfs-pointer")
    assert (flaw.found["size"], flaw.expected["size"]) == (len(text), 4976698672)


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"# xet version 0\nfilesize = 4\n", "git-xet"), (b"/annex/objects/SHA256E-s4--a.safetensors\n", "git-annex")],
)
def test_c001_pointers_of_other_tools_are_named(tmp_path, text, said):
    root = micro(tmp_path / "m")
    (root / "model.safetensors").write_bytes(text)
    assert f"is a {said} pointer in place of the file" in only(validate(root), "header-invalid").message


@pytest.mark.parametrize(
    ("name", "is_fault"),
    [
        ("pytorch_model.bin", False),
        ("assets/benchmark.png", False),
        ("original/consolidated.00.pth", False),
        ("onnx/model.onnx", False),
        ("consolidated.safetensors", True),
        ("preprocessor_config.json", True),
    ],
)
def test_c001_a_pointer_to_what_no_engine_is_given_is_no_fault(tmp_path, name, is_fault):
    root = micro(tmp_path / "m")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(POINTER)
    assert ("lfs-pointer" in alarms(validate(root, {"engine": VLLM}))) is is_fault


@pytest.mark.parametrize(
    "left",
    ["model-00001-of-00002.safetensors_.gstmp", "model-00002-of-00002.safetensors.6eF3d4C2", ".model.gguf.Xa12Bc"],
)
def test_c021_each_tool_s_way_to_call_what_it_writes_is_known(tmp_path, left):
    root = micro(tmp_path / "m")
    (root / left).write_bytes(b"x")
    assert only(validate(root), "source-unstable").found == left
    (root / left).rename(root / "notes.txt")
    assert alarms(validate(root)) == set()


@pytest.mark.parametrize(("name", "usual"), [("Chain-Q8_0.GGUF", "Chain-Q8_0.gguf"), ("a.GGuf", "a.gguf")])
def test_c024_an_ending_in_capitals_is_no_ending_that_engines_look_for(tmp_path, name, usual):
    chain.write_chain(tmp_path / name)
    assert only(validate(tmp_path, {"engine": LLAMACPP}), "case-collision").expected == usual
    (tmp_path / name).rename(tmp_path / usual)
    assert alarms(validate(tmp_path, {"engine": LLAMACPP})) == set()


TOWER = [T(f"visual.blocks.{number}.attn.qkv.weight", "BF16", (24, 8)) for number in range(4)]
SEES = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_bias": False}


@pytest.mark.parametrize(
    ("tensors", "changes", "code"),
    [
        (TOWER, {"vision_config": {"depth": 4}}, "tensors-unreachable"),
        ([T("mtp.fc.weight", "BF16", (8, 16))], {"vision_config": {"depth": 4}}, "shard-orphan"),
        (TOWER, {}, "shard-orphan"),
    ],
)
def test_c007_a_file_with_the_tower_of_a_model_that_sees_is_reached(tmp_path, tensors, changes, code):
    root = micro(tmp_path / "m", **(SEES | changes if changes else {}))
    write_safetensors(root / "extra.safetensors", tensors)
    places = {one.name: "model.safetensors" for one in micro_tensors()}
    write_json(root / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    assert alarms(validate(root, {"engine": VLLM})) == {code}
    places |= {one.name: "extra.safetensors" for one in tensors}
    write_json(root / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    assert alarms(validate(root, {"engine": VLLM})) == set()


@pytest.mark.parametrize(
    ("architecture", "is_generator"),
    [
        *(
            (name, True)
            for name in ("InternVLChatModel", "ChatGLMModel", "Qwen2_5OmniModel", "QWenLMHeadModel", "MiniCPMV")
        ),
        *(
            (name, False)
            for name in ("Qwen3Model", "Gemma3TextModel", "Qwen2ForRewardModel", "LlamaForSequenceClassification")
        ),
    ],
)
def test_c015_classes_that_generate_have_a_head_whatever_they_are_called(tmp_path, architecture, is_generator):
    root = micro(tmp_path / "m", tensors=micro_tensors()[:-1], architectures=[architecture])
    found = codes(validate(root, {"engine": VLLM, "features": ["completions"]}), "block") - {"tokenizer-missing"}
    assert found == ({"head-missing"} if is_generator else {"head-absent-for-feature"})


@pytest.mark.parametrize(
    ("family", "name", "is_fault"),
    [
        ("llama", "output.weight", True),
        ("qwen3", "embed_out.weight", True),
        ("gpt_neox", "lm_head.weight", True),
        ("gpt_neox", "embed_out.weight", False),
        ("llama", "language_model.lm_head.weight", False),
    ],
)
def test_c015_a_head_has_the_name_that_its_family_looks_for(tmp_path, family, name, is_fault):
    root = write_layout(tmp_path / "m", family)
    heads = ("lm_head.weight", "embed_out.weight")
    tensors = [T(name if one in heads else one, "BF16", shape) for one, shape in tensors_of(family).items()]
    write_safetensors(root / "model.safetensors", tensors)
    assert alarms(validate(root, {"engine": VLLM})) == ({"head-missing"} if is_fault else set())


def microscaled(root, byte):
    """A layout of gpt-oss whose experts are blocks of 4-bit numbers, and one scale of them."""
    write_layout(root, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    found = []
    for name, shape in tensors_of("gpt_oss").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found.append(T(name, "BF16", shape))
            continue
        scales = bytearray(b"\x7f" * (shape[0] * shape[1]))
        if name == "model.layers.1.mlp.experts.down_proj":
            scales[5] = byte
        found += [
            T(f"{name}_blocks", "U8", (*shape[:2], 1, 16)),
            T(f"{name}_scales", "U8", (*shape[:2], 1), bytes(scales)),
        ]
    write_safetensors(root / "model.safetensors", sorted(found, key=lambda one: -WIDTHS[one.dtype]))
    return root


def test_c019_a_scale_in_a_byte_that_stands_for_no_number_is_found(tmp_path):
    flaw = only(validate(microscaled(tmp_path / "m", 255)), "non-finite-weight")
    assert flaw.found["tensor"] == "model.layers.1.mlp.experts.down_proj_scales"
    assert (flaw.found["count"], flaw.found["first_index"]) == (1, 5)
    assert alarms(validate(microscaled(tmp_path / "n", 254))) == set()


# ------------------------------------------------------------------------------------------- templates and tokens

CLOCK = "{{ strftime_now('%A') }}{{ tools | tojson }}"


@pytest.mark.parametrize(
    "condition",
    [
        "tools and messages[0].role != 'system'",
        "messages[0].role == 'system' and not tools",
        "messages | length > 2 and not tools",
    ],
)
def test_c034_a_date_that_one_kind_of_conversation_gets_is_found(tmp_path, condition):
    template = "{% if " + condition + " %}" + CLOCK + "{% endif %}" + T0
    assert alarms(validate(speak(micro(tmp_path / "m"), template=template))) == {"template-clock"}


@pytest.mark.parametrize(
    "opening", ["<｜think｜>", "<|thought|>", "<|inner_prefix|>", "<reflection>\n", "<analysis>\n"]
)
def test_c036_further_words_open_the_reasoning(tmp_path, opening):
    template = T0.replace("assistant\n", "assistant\n" + opening)
    found = validate(speak(micro(tmp_path / "m"), template=template), {"engine": VLLM})
    assert only(found, "reasoning-parser-missing").severity == "block"


@pytest.mark.parametrize(
    ("line", "undefined"),
    [("{{ p.description | trim }}", []), ("{{ p.description }}{{ p.type }}", ["type"]), ("{{ n }}", [])],
)
def test_c033_what_a_plain_parameter_may_lack_is_no_fault_of_a_reference(tmp_path, line, undefined):
    loop = "{% for t in tools or [] %}{{ t.function.name }}{% for n, p in t.function.parameters.properties.items() %}"
    root = speak(micro(tmp_path / "m"), template=loop + line + "{% endfor %}{% endfor %}" + T0)
    found = [one.found["undefined"] for one in validate(root).flaws if one.found["parameter"] == "$ref"]
    assert found == ([undefined] if undefined else [])


EXAONE = (
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}[|endofturn|]\n{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]{% endif %}"
)
MINIMAX = (
    "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)


@pytest.mark.parametrize("steps", [None, {"type": "Metaspace"}], ids=["counted", "not-counted"])
@pytest.mark.parametrize(
    ("template", "names", "lost"),
    [
        (EXAONE, ("<pad>", "[BOS]", "[|endofturn|]", "[|assistant|]", "[|user|]"), "[|user|]"),
        (MINIMAX, ("<pad>", "]~!b[", "[e~[", "]~b]", "<x>"), "]~b]"),
    ],
)
def test_c041_markers_of_every_shape_are_one_token(tmp_path, template, names, lost, steps):
    for without in ([], [lost]):
        root = speak(micro(tmp_path / lost / str(len(without)), eos_token_id=2), template=template, names=names)
        speak(root, template=template, names=names, without_added=without)
        if steps:
            edit_json(root / "tokenizer.json", lambda told: told.update(pre_tokenizer=steps))
        found = [one.found["token"] for one in validate(root).flaws if one.code == "marker-split"]
        assert found == without


@pytest.mark.parametrize(
    ("engine", "override", "lost"),
    [
        (SGLANG, '{"eos_token_id": 2}', [4]),
        (SGLANG, '{"eos_token_id": [4]}', []),
        (SGLANG, '{"rope_theta": 5e5}', []),
        (VLLM, None, []),
    ],
)
def test_c047_a_launch_argument_that_changes_the_configuration_may_lose_stop_ids(tmp_path, engine, override, lost):
    words = [] if override is None else ["--json-model-override-args", override]
    found = validate(speak(micro(tmp_path / "m")), {"engine": engine | {"arguments": words}})
    flaws = [one for one in found.flaws if one.code == "stop-set-overridden"]
    assert [(one.severity, one.expected["stops"]) for one in flaws] == ([("block", [2, 4])] if lost else [])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--override-gen", '{"temperature": 0.2}'], "stop-set-overridden"),
        (["--override-gen.temperature=0.2"], "stop-set-overridden"),
        (["--max-model", "512"], "context-too-long"),
        ("--max-model-len 512", "context-too-long"),
        ("--override-generation-config '{\"temperature\": 0.2}'", "stop-set-overridden"),
        (["--no-enable-pref"], None),
        ("--max-model-len 64", None),
    ],
)
def test_c047_beginnings_of_names_and_words_in_one_text_are_taken_as_engines_take_them(tmp_path, words, code):
    root = speak(micro(tmp_path / "m"))
    write_json(root / "generation_config.json", EOS)
    found = validate(root, {"engine": VLLM | {"args": words}})
    assert alarms(found) == ({code} if code else set())


def test_c047_words_that_no_shell_could_read_are_refused(tmp_path):
    with pytest.raises(DeclaredError, match="/engine/args"):
        validate(micro(tmp_path / "m"), {"engine": VLLM | {"args": "--alias 'x"}})


@pytest.mark.parametrize(("engine", "words"), [("vllm", ["--tensor-parallel", "4"]), ("sglang", ["--tensor-par=4"])])
def test_c052_a_degree_under_the_beginning_of_its_name_counts(tmp_path, engine, words):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008, "model_type": "llama"}
    root = config_only(tmp_path / "m", **sizes, quantization_config=GPTQ)
    told = {"engine": (VLLM if engine == "vllm" else SGLANG) | {"arguments": words}}
    assert only(validate(root, told), "quant-group-tp").found["groups"] == 21.5


@pytest.mark.parametrize(("seconds", "is_fault"), [("0", True), ("20", False)])
def test_c126_a_drain_of_no_seconds_is_none(tmp_path, seconds, is_fault):
    told = {"engine": VLLM | {"arguments": ["--shutdown-timeout", seconds]}, "drain": {"termination_grace": 30}}
    assert alarms(validate(micro(tmp_path / "m"), told)) == ({"drain-too-short"} if is_fault else set())


@pytest.mark.parametrize(("asked", "found"), [({"temperature": 0.6, "top_k": 40}, {"temperature": 0.8}), ({}, None)])
def test_c049_defaults_that_lie_beside_a_gguf_file_are_not_read(tmp_path, asked, found):
    chain.write_chain(tmp_path / "model.gguf")
    write_json(tmp_path / "generation_config.json", asked | {"eos_token_id": 4})
    flaws = [one.found for one in validate(tmp_path, {"engine": LLAMACPP}).flaws if one.code == "engine-sampling-diff"]
    assert flaws == ([] if found is None else [found])


@pytest.mark.parametrize(("words", "is_fault"), [([], True), (["--tool_parser", "qwen3"], False)])
def test_c112_tensorrt_llm_has_a_parser_of_tools_of_its_own(tmp_path, words, is_fault):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + T0
    root = speak(micro(tmp_path / "m", eos_token_id=2), template=template)
    write_json(root / "generation_config.json", EOS)
    found = validate(root, {"engine": TRTLLM | {"arguments": words}, "features": ["chat", "tools"]})
    assert ("tool-parser-missing" in codes(found, "block")) is is_fault


# --------------------------------------------------------------------------------------- quantization and layouts

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
FALCON = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "multi_query": True, "vocab_size": 65024}
MPT = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "n_layers": 2, "n_heads": 16}


@pytest.mark.parametrize(
    ("sizes", "degree", "key"),
    [
        (FALCON | {"hidden_size": 4544, "num_attention_heads": 71 * 8, "head_dim": 128}, 8, "intermediate_size"),
        (MPT | {"d_model": 2112, "head_dim": 128}, 16, "intermediate_size"),
        (MPT | {"d_model": 2048, "head_dim": 128}, 16, None),
    ],
)
def test_c052_an_inner_size_that_nobody_says_is_four_times_the_hidden_one(tmp_path, sizes, degree, key):
    root = config_only(tmp_path / "m", **sizes, quantization_config=GPTQ)
    found = validate(root, {"engine": VLLM, "topology": {"tp": degree}})
    assert {name for one in found.flaws if one.code == "quant-group-tp" for name in one.found} >= (
        {key} if key else set()
    )
    assert bool(codes(found, "block")) is bool(key)


def stored(root, told, make, **changes):
    """MICRO whose linear layers are stored as `make` says: suffix → type and a share of the columns."""
    tensors = []
    for one in micro_tensors():
        stem = one.name.removesuffix(".weight")
        tensors += (
            [T(f"{stem}.{end}", kind, (one.shape[0], max(1, one.shape[1] // share))) for end, kind, share in make]
            if "_proj" in one.name
            else [one]
        )
    return micro(root, tensors=sorted(tensors, key=lambda one: -WIDTHS[one.dtype]), quantization_config=told, **changes)


PACKED = (("weight_packed", "I32", 4), ("weight_scale", "BF16", 99))
EIGHT = (("weight", "F8_E4M3", 1), ("weight_scale", "F32", 99))
FOUR = (("weight", "U8", 2), ("weight_scale", "F8_E4M3", 16))
FOUR_IN_TWO = (*FOUR, ("weight_scale_2", "F32", 99))
WHOLE = (("weight", "I8", 1), ("weight_scale", "F32", 99))


def compressed(form):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("told", "make", "is_sound"),
    [
        ({"quant_method": "fp8"}, PACKED, False),
        ({"quant_method": "fp8"}, FOUR, False),
        ({"quant_method": "fp8"}, EIGHT, True),
        (compressed("pack-quantized"), FOUR, False),
        (compressed("pack-quantized"), PACKED, True),
        (compressed("float-quantized"), PACKED, False),
        (compressed("float-quantized"), EIGHT, True),
        (compressed("int-quantized"), EIGHT, False),
        (compressed("int-quantized"), WHOLE, True),
        (compressed("mixed-precision"), FOUR, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, FOUR, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, EIGHT, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, FOUR_IN_TWO, True),
    ],
)
def test_c057_modules_are_stored_as_the_format_that_is_declared(tmp_path, told, make, is_sound):
    found = validate(stored(tmp_path / "m", told, make))
    assert ("quant-config-mismatch" not in codes(found)) is is_sound


@pytest.mark.parametrize(
    ("order", "kind", "is_sound"),
    [
        ([0] * 256, "I64", False),
        ([place // 128 for place in range(256)], "I64", True),
        ([place // 256 for place in range(512)], "I32", False),
        ([place // 64 for place in range(128)], "I32", False),
    ],
)
def test_c059_an_order_has_a_number_for_each_column_of_any_whole_type(tmp_path, order, kind, is_sound):
    stem, code = "model.layers.0.self_attn.o_proj", {"I32": "i", "I64": "q"}[kind]
    root = config_only(tmp_path / "m", quantization_config=GPTQ)
    tensors = [
        T(f"{stem}.g_idx", kind, (len(order),), struct.pack(f"<{len(order)}{code}", *order)),
        T(f"{stem}.qweight", "I32", (32, 8)),
        T(f"{stem}.qzeros", "I32", (2, 1)),
        T(f"{stem}.scales", "F16", (2, 8)),
    ]
    write_safetensors(root / "model.safetensors", tensors)
    assert ("g-idx-invalid" not in codes(validate(root), "block")) is is_sound


@pytest.mark.parametrize(("bits", "is_sound"), [(3, True), (5, False), (6, False), (8, True)])
@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda one: one["name"])
def test_c060_what_autoround_packs_has_a_table_of_its_own(tmp_path, engine, bits, is_sound):
    told = {"quant_method": "auto-round", "bits": bits, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
    found = validate(config_only(tmp_path / "m", quantization_config=told), {"engine": engine})
    assert ("quant-bits-unsupported" not in codes(found, "block")) is is_sound


@pytest.mark.parametrize(
    ("name", "is_sound"),
    [
        *(
            (name, False)
            for name in ("NVIDIA GeForce RTX 3060", "ampere", "turing", "Quadro RTX 6000", "Jetson AGX Orin")
        ),
        *((name, True) for name in ("hopper", "ada", "blackwell", "NVIDIA RTX 4000 SFF Ada Generation", "RTX 5070 Ti")),
    ],
)
def test_c062_cards_and_generations_are_known_by_their_names(tmp_path, name, is_sound):
    root = config_only(tmp_path / "m", quantization_config={"quant_method": "fp8"})
    found = validate(root, {"engine": SGLANG, "hardware": {"accelerator": name}})
    assert alarms(found) == (set() if is_sound else {"arch-unsupported"})


@pytest.mark.parametrize(
    ("told", "name", "severity"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "h100", "warn"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "v100", "block"),
        ({"quant_method": "mxfp4"}, "h100", None),
    ],
)
def test_c062_four_bit_floats_need_cards_that_have_them(tmp_path, told, name, severity):
    root = config_only(tmp_path / "m", quantization_config=told)
    found = validate(root, {"engine": VLLM, "hardware": {"accelerator": name}})
    assert [one.severity for one in found.flaws if one.code == "arch-unsupported"] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("words", "is_fault"), [(["all"], False), (["q_proj", "o_proj"], False), (["o_proj"], True), (["down_proj"], True)]
)
def test_c080_modules_that_sglang_is_told_to_take_are_those_of_the_adapter(tmp_path, words, is_fault):
    root = micro(tmp_path / "m")
    adapt(root / "adapt")
    engine = SGLANG | {"arguments": ["--enable-lora", "--lora-target-modules", *words]}
    found = alarms(validate(root, {"engine": engine, "adapters": {"adpt": "adapt"}}))
    assert found == ({"lora-no-match"} if is_fault else set())


# ---------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("params", "is_sound"),
    [
        ({"yarn": {"factor": 16, "original_max_position_embeddings": 16384}}, True),
        ({"yarn": {"factor": 4, "original_max_position_embeddings": 16384}}, False),
        ({"yarn": None}, False),
    ],
)
def test_c070_a_stretched_length_of_the_file_in_force_counts(tmp_path, params, is_sound):
    root = micro(tmp_path / "m", max_position_embeddings=262144)
    write_json(root / "params.json", {"dim": 8} | params)
    words = ["--config-format", "mistral", "--max-model-len", "200000"]
    found = validate(root, {"engine": VLLM | {"arguments": words}})
    assert ("config-sources-disagree" not in codes(found, "block")) is is_sound


@pytest.mark.parametrize(
    ("model_type", "part", "top", "version", "is_sound"),
    [
        ("phi", 0.4, None, "4.57.0", False),
        ("phi", 0.4, 0.4, "4.57.0", True),
        ("phi", 0.4, None, "5.2.0", True),
        ("phi", 0.5, None, "4.57.0", True),
        ("phi3", 0.75, None, "4.57.0", False),
        ("gemma2", 0.5, None, "4.57.0", True),
    ],
)
def test_c071_the_share_of_a_head_that_turns_has_two_places_too(tmp_path, model_type, part, top, version, is_sound):
    inner = {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": part}
    told = micro_config(model_type=model_type, rope_parameters=inner, partial_rotary_factor=top)
    root = config_only(tmp_path / "m", **told)
    found = validate(root, {"engine": VLLM | {"build": {"transformers": version}}})
    flaws = [(one.found["partial_rotary_factor"], one.expected) for one in found.flaws if one.code == "rope-format"]
    usual = {"phi": 0.5, "phi3": 1.0}
    assert flaws == ([] if is_sound else [(usual[model_type], {"partial_rotary_factor": part})])
