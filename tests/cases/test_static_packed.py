"""Neighbours of the incident cases of quantization: other methods' tensors, places of bits, and accelerators."""

import struct

import pytest

from tests.support.checkpoints import (
    WIDTHS,
    T,
    alarms,
    codes,
    micro,
    micro_config,
    micro_tensors,
    only,
    validate,
    write_json,
)

VLLM, SGLANG = {"name": "vllm", "version": "0.32.0"}, {"name": "sglang", "version": "0.5.4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


def packed(root, make, *, prefix="model.", **changes):
    """MICRO whose linear layers are carried by what `make` gives of each: name, rows, columns."""
    tensors = []
    for one in micro_tensors(prefix):
        is_linear = "_proj" in one.name
        tensors += make(one.name.removesuffix(".weight"), *one.shape) if is_linear else [one]
    return micro(root, tensors=sorted(tensors, key=lambda one: -WIDTHS[one.dtype]), **changes)


def mlx(name, out, into):
    return [
        T(f"{name}.weight", "U32", (out, into // 8)),
        *(T(f"{name}.{one}", "BF16", (out, 1)) for one in ("scales", "biases")),
    ]


def eight(name, out, into):
    return [T(f"{name}.weight", "I8", (out, into)), T(f"{name}.SCB", "F32", (out,))]


def hqq(name, out, into):
    return [
        T(f"{name}.W_q", "U8", (out, into // 2)),
        T(f"{name}.scale", "F16", (out, 1)),
        T(f"{name}.zero", "F16", (out, 1)),
    ]


def aqlm(name, out, into):
    return [T(f"{name}.codes", "I8", (out, into // 8, 1)), T(f"{name}.codebooks", "F16", (1, 16, 1, 8))]


def gptq(name, out, into):
    sizes = {"qweight": (into // 8, out), "qzeros": (into // 8, max(1, out // 8))}
    return [
        *(T(f"{name}.{end}", "I32", size) for end, size in sizes.items()),
        T(f"{name}.scales", "F16", (into // 8, out)),
    ]


def awq(name, out, into):
    sizes = {"qweight": (into, max(1, out // 8)), "qzeros": (into // 8, max(1, out // 8))}
    return [
        *(T(f"{name}.{end}", "I32", size) for end, size in sizes.items()),
        T(f"{name}.scales", "F16", (into // 8, max(8, out))),
    ]


def fp8(name, out, into, *, scale="weight_scale_inv", kind="F8_E4M3"):
    blocks = (-(-out // 8), -(-into // 8))
    return [T(f"{name}.weight", kind, (out, into)), *([T(f"{name}.{scale}", "F32", blocks)] if scale else [])]


@pytest.mark.parametrize("make", [mlx, eight, hqq, aqlm])
def test_c057_tensors_of_every_method_need_one_that_is_declared(tmp_path, make):
    flaw = only(validate(packed(tmp_path / "m", make)), "quant-config-mismatch")
    assert (flaw.found["packed"], flaw.found["method"]) == (7, None)


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "hqq"},
        {"quant_method": "aqlm", "nbits_per_codebook": 16},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
        {"quant_method": "w8a8_int8"},
        {"group_size": 64, "bits": 4},
    ],
)
def test_c057_a_method_whose_tensors_no_layer_has_is_left_over(tmp_path, told):
    assert (
        only(validate(micro(tmp_path / "m", quantization_config=told)), "quant-config-mismatch").found["carried"] == 0
    )


@pytest.mark.parametrize(
    ("engine", "version", "method", "is_read"),
    [
        ("vllm", "0.27.1", "bitsandbytes", True),
        ("vllm", "0.28.0", "bitsandbytes", False),  # a plugin's since
        ("vllm", "0.32.0", "bitsandbytes", False),
        ("vllm", "0.32.0", "fp_quant", True),
        ("sglang", "0.5.8", "w4afp8", False),
        ("sglang", "0.5.9", "w4afp8", True),
        ("sglang", "0.5.9", "quark_mxfp4", False),
        ("sglang", "0.5.23", "quark_mxfp4", True),
    ],
)
def test_c057_a_method_is_read_by_the_versions_that_have_it(tmp_path, engine, version, method, is_read):
    root = micro(tmp_path / "m", quantization_config={"quant_method": method})
    found = alarms(validate(root, {"engine": {"name": engine, "version": version}}))
    assert ("quant-method-unsupported" in found) is not is_read


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_c057_what_mlx_packed_is_for_mlx(tmp_path, key):
    root = packed(tmp_path / "m", mlx, **{key: {"group_size": 8, "bits": 4}})
    assert alarms(validate(root)) == set()
    assert only(validate(root, {"engine": VLLM}), "quant-method-unsupported").found == "mlx"


@pytest.mark.parametrize(
    ("make", "told", "is_fault"),
    [
        (gptq, GPTQ, False),
        (gptq, AWQ, True),
        (gptq, GPTQ | {"bits": 8}, True),
        (gptq, GPTQ | {"group_size": 4}, True),
        (gptq, GPTQ | {"group_size": -1}, True),
        (gptq, GPTQ | {"bits": 8, "dynamic": {"+:.*": {"bits": 4}}}, False),
        (awq, GPTQ, True),
        (awq, AWQ | {"group_size": 16}, True),
    ],
)
def test_c057_bits_and_groups_are_those_that_the_tensors_have(tmp_path, make, told, is_fault):
    found = validate(packed(tmp_path / "m", make, quantization_config=told))
    flaws = [one for one in found.flaws if one.code == "quant-config-mismatch"]
    assert bool(flaws) is is_fault
    if is_fault:
        assert flaws[0].found["scales"] != flaws[0].expected["scales"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, None),
        ({"scale": None}, "unscaled"),
        ({"kind": "BF16"}, "wide"),
        ({"kind": "BF16", "scale": None}, "carried"),
    ],
)
def test_c057_eight_bit_floats_have_their_scales_and_are_eight_bits(tmp_path, options, key):
    root = packed(tmp_path / "m", lambda *told: fp8(*told, **options), quantization_config=FP8)
    flaws = [one.found for one in validate(root).flaws if one.code == "quant-config-mismatch"]
    assert [one[key] for one in flaws] == ([] if key is None else [0 if key == "carried" else 7])


def ordered(order):
    def make(name, out, into):
        sizes = (("weight_packed", "I32", (out, into // 8)), ("weight_shape", "I64", (2,)))
        told = [T(f"{name}.{end}", kind, size) for end, kind, size in sizes]
        told.append(T(f"{name}.weight_scale", "BF16", (out, into // 8)))
        data = b"".join(struct.pack("<i", order(place)) for place in range(into)) if order else b""
        return [*told, *([T(f"{name}.weight_g_idx", "I32", (into,), data)] if order else [])]

    return make


@pytest.mark.parametrize(
    ("order", "actorder", "expected"),
    [
        (None, "group", {"g-idx-missing"}),
        (lambda _: 0, "group", {"g-idx-invalid"}),
        (lambda place: place // 8, "group", set()),
        (None, "static", set()),
    ],
)
def test_c059_compressed_tensors_keep_their_order_under_another_name(tmp_path, order, actorder, expected):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "actorder": actorder}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    told["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = validate(packed(tmp_path / "m", ordered(order), quantization_config=told))
    assert {one for one in codes(found) if one.startswith("g-idx")} == expected


def config_only(root, **changes):
    root.mkdir(parents=True)
    write_json(root / "config.json", micro_config(**changes))
    return root


def groups(*weights, targets=("re:.*attn.*", "Linear")):
    told = {f"group_{n}": {"targets": [targets[n]], "weights": one} for n, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": told}


W4, W3, F8 = {"num_bits": 4, "type": "int"}, {"num_bits": 3, "type": "int"}, {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("told", "pointer"),
    [
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 3}}}, "/quantization_config/dynamic/+:.*down.*/bits"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, None),
        (GPTQ | {"bits": "3"}, "/quantization_config/bits"),
        (groups(W4, W3), "/quantization_config/config_groups/group_1/weights/num_bits"),
        (groups(W4, W4), None),
    ],
)
def test_c060_bits_of_some_modules_count_too(tmp_path, told, pointer):
    found = validate(config_only(tmp_path / "m", quantization_config=told), {"engine": VLLM})
    flaws = [one for one in found.flaws if one.code == "quant-bits-unsupported"]
    assert [one.pointer for one in flaws] == ([] if pointer is None else [pointer])


@pytest.mark.parametrize(
    ("told", "engine", "words", "arch", "severity"),
    [
        (groups(W4, F8), SGLANG, [], "sm_86", "block"),
        (groups(W4, W4), SGLANG, [], "sm_86", None),
        (None, SGLANG, ["--quantization", "fp8"], "sm_86", "block"),
        (None, VLLM, ["--quantization", "fp8"], "sm_86", "warn"),
        (None, VLLM, ["--quantization", "fp8"], "sm_90", None),
        ({"quant_method": "fp8"}, VLLM, [], "amd-mi250x", "block"),
        ({"quant_method": "fp8"}, VLLM, [], "gfx90a", "block"),
        ({"quant_method": "fp8"}, VLLM, [], "gfx942", None),
        (None, VLLM, [], "Tesla T4", "warn"),
        (None, VLLM, ["--dtype", "bfloat16"], "sm_75", "block"),
        (None, VLLM, ["--dtype", "half"], "sm_75", None),
    ],
)
def test_c062_numbers_that_an_accelerator_lacks_are_told_wherever_they_come_from(
    tmp_path, told, engine, words, arch, severity
):
    root = config_only(tmp_path / "m", quantization_config=told)
    found = validate(root, {"engine": engine | {"arguments": words}, "hardware": {"accelerator": arch}})
    assert [one.severity.value for one in found.flaws if one.code == "arch-unsupported"] == (
        [severity] if severity else []
    )


CACHE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
SCALES = [T(f"model.layers.0.self_attn.{one}_scale", "BF16", (1,), b"\x80\x3f") for one in "kv"]


@pytest.mark.parametrize(
    ("words", "more", "told", "is_told"),
    [
        (["--kv-cache-dtype", "fp8"], [], None, True),
        (["--kv-cache-dtype", "fp8"], SCALES, None, False),
        (["--kv-cache-dtype", "fp8_e5m2", "--calculate-kv-scales"], [], None, False),
        ([], [], CACHE, True),
        ([], SCALES, CACHE, False),
        (["--kv-cache-dtype", "bfloat16"], [], CACHE, False),
        ([], [], None, False),
    ],
)
def test_a_cache_of_eight_bit_floats_has_scales_or_says_that_it_has_none(tmp_path, words, more, told, is_told):
    root = micro(tmp_path / "m", tensors=[*micro_tensors(), *more], quantization_config=told)
    flaws = [
        one for one in validate(root, {"engine": VLLM | {"arguments": words}}).flaws if one.code == "kv-scales-missing"
    ]
    assert [(one.found["layers"], one.severity.value) for one in flaws] == ([([0], "warn")] if is_told else [])


@pytest.mark.parametrize(
    ("method", "asked", "is_fault"),
    [
        ("gptq", "moe_wna16", False),
        ("gptq", "gptq_bitblas", False),
        ("compressed-tensors", "w8a8_fp8", False),
        ("modelopt", "modelopt_mixed", False),
        ("awq", "gptq_marlin", True),
        ("compressed-tensors", "fp8", True),
    ],
)
def test_an_argument_that_reads_a_method_s_checkpoints_is_no_other_method(tmp_path, method, asked, is_fault):
    root = config_only(tmp_path / "m", quantization_config={"quant_method": method, "bits": 4})
    found = validate(root, {"engine": SGLANG | {"arguments": ["--quantization", asked]}})
    assert ("quant-argument-differs" in codes(found)) is is_fault
