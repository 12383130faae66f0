"""A composition's plan: which device holds what of real headers, the number that decides, and the smallest layout."""

import struct
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest

from gates.files.header import Tensor
from gates.placement import PlacementUnknown
from gates.placement.ledger import Reserve
from gates.placement.plan import Asked, as_json, declared_topology, plan, reserve_of
from gates.placement.shards import Layout, share_of
from gates.placement.topology import Topology, candidates, obstacles, parse, stages
from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.shape import shape_of
from tests.support.checkpoints import T, write_json, write_safetensors
from tests.support.families import CONFIGS, FAMILIES
from tests.support.headers import gguf, info, pair, text
from tests.support.published import decoder, deepseek, experts, write

# hidden 128, 8 heads and 2 key-value heads of 16, inner 256, 1,000 rows, in 16 bits
SIZES = {"layers": 2, "hidden": 128, "heads": 8, "keys": 2, "inner": 256, "rows": 1000}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ROWS = 1000 * 128 * 2
LAYER = 2 * 32_768 + 2 * 8_192 + 2 * 256 + 3 * 65_536
"""Queries and outputs, keys and values, two norms, and three matrices of the MLP."""
LAYER_ON_4 = 2 * 8_192 + 2 * 4_096 + 2 * 256 + 3 * 16_384
MIB = 2**20
ROOMY = Asked(Reserve(64 * MIB, Decimal(1)), context_tokens=512)


def made(root, tensors=None, **changes):
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "config.json", {key: one for key, one in (CONFIG | changes).items() if one is not None})
    write_safetensors(root / "model.safetensors", list(decoder(**SIZES) if tensors is None else tensors), sparse=True)
    return root


def planned(root, asked=ROOMY, **declared):
    return plan(of_directory(root, read_declared(declared), beside=root), asked)


def weights(found):
    return [ledger.weights for ledger in found.judged.ledgers]


def on(layout):
    return replace(ROOMY, topology=parse(layout))


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("layout", "engine", "expected"),
    [
        ("tp=1", None, [2 * ROWS + 2 * LAYER + 256]),
        # 1,000 rows are padded to 1,024, and over four devices to 256 each
        ("tp=1", "vllm", [2 * 1024 * 256 + 2 * LAYER + 256]),
        ("tp=4", "vllm", [2 * 256 * 256 + 2 * LAYER_ON_4 + 256]),
        ("tp=4", None, [2 * ROWS + 2 * LAYER_ON_4 + 256]),
        ("tp=1,pp=2", None, [ROWS + LAYER, LAYER + 256 + ROWS]),
        ("tp=4,pp=2", None, [ROWS + LAYER_ON_4, LAYER_ON_4 + 256 + ROWS]),
    ],
)
def test_each_device_holds_its_share_of_what_the_headers_say(tmp_path, layout, engine, expected):
    declared = {} if engine is None else {"engine": {"name": engine, "version": "0.32.0"}}
    assert weights(planned(made(tmp_path / "m"), on(layout), **declared)) == expected


def test_context_beyond_the_model_s_positions_is_said_beside_the_plan(tmp_path):
    root = made(tmp_path / "m", max_position_embeddings=4096)
    beyond = planned(root, replace(on("tp=1"), context_tokens=4097))
    assert any(one.startswith("4097 tokens of context are more than the 4096 ") for one in beyond.assumed)
    assert not any("positions" in one for one in planned(root, replace(on("tp=1"), context_tokens=4096)).assumed)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage(tmp_path):
    root = made(tmp_path / "m", decoder(**SIZES, head_name=None), tie_word_embeddings=True)
    assert weights(planned(root, on("pp=2"))) == [ROWS + LAYER, LAYER + 256 + ROWS]
    assert weights(planned(root, on("tp=1"))) == [ROWS + 2 * LAYER + 256]


def test_a_head_beside_a_tied_embedding_is_not_loaded(tmp_path):
    root = made(tmp_path / "m", tie_word_embeddings=True)
    assert weights(planned(root)) == [ROWS + 2 * LAYER + 256]


def moe(root, count=4):
    feed = experts(count, 64, 128, ("gate_proj", "up_proj", "down_proj"), "mlp.gate")
    return made(
        root,
        decoder(**SIZES | {"inner": 0}, feed=feed),
        model_type="qwen3_moe",
        num_experts=count,
        moe_intermediate_size=64,
    )


@pytest.mark.parametrize(
    ("layout", "count", "held", "groups"),
    [
        ("tp=1", 4, 4 * 49_152, 1),
        ("tp=2", 4, 2 * 49_152, 1),
        ("tp=2,ep=2", 4, 2 * 49_152, 1),
        ("tp=4,ep=2", 4, 49_152, 1),
        ("tp=2,ep=2", 3, 2 * 49_152, 1),  # three experts on two devices: one has two
        ("tp=1,ep=4", 4, 49_152, 4),
    ],
)
def test_experts_are_spread_and_cut_as_the_layout_says(tmp_path, layout, count, held, groups):
    found = planned(moe(tmp_path / "m", count), on(layout), engine={"name": "vllm", "version": "0.32.0"})
    shares = dict(found.judged.ledgers[0].shares)
    assert shares["experts"] == 2 * held
    assert found.judged.topology.groups == groups
    # norms and the router of count × 128 numbers
    assert shares["copied"] == 2 * (2 * 256 + count * 256)
    if count == 3:  # which SGLang does not do
        other = planned(tmp_path / "m", on(layout), engine={"name": "sglang", "version": "0.5.15"})
        assert "3 experts cannot be divided evenly" in other.judged.judgement.message


def test_groups_that_attend_apart_hold_sequences_apart(tmp_path):
    root = moe(tmp_path / "m")
    one, four = planned(root, on("tp=1")), planned(root, on("tp=1,ep=4"))
    assert four.judged.judgement.sequences == 4 * four.judged.ledgers[0].sequences
    assert four.judged.judgement.sequences > 4 * one.judged.judgement.sequences


@pytest.mark.parametrize(
    ("name", "shape", "share"),
    [
        ("self_attn.qkv_proj.weight", (12 * 16, 128), Fraction(2 + 2 * 1, 8 + 2 * 2)),
        ("self_attn.k_proj.weight_scale", (512, 1), Fraction(1, 2)),
        ("self_attn.o_proj.weight_scale", (512, 1), Fraction(1)),
        ("mlp.down_proj.bias", (512,), Fraction(1)),
        ("mlp.up_proj.bias", (512,), Fraction(1, 4)),
        ("mlp.up_proj.qweight", (64, 64), Fraction(1, 4)),
        ("mlp.down_proj.g_idx", (512,), Fraction(1)),
        ("mlp.up_proj.input_scale", (1,), Fraction(1)),
        ("self_attn.kv_a_proj_with_mqa.weight", (576, 128), Fraction(1)),
        ("self_attn.kv_b_proj.weight", (576, 128), Fraction(1, 4)),
        ("mlp.gate.weight", (64, 128), Fraction(1)),
        ("mlp.up_proj.g_idx", (512,), Fraction(1)),
        ("self_attn.indexer.wk.weight", (128, 128), Fraction(1)),
        ("mamba.in_proj.weight", (64, 128), Fraction(1, 4)),
        ("block_sparse_moe.input_linear.weight", (4, 64, 128), Fraction(1, 4)),
        ("block_sparse_moe.router.layer.weight", (4, 128), Fraction(1)),
        ("attention.wqkv.weight", (12 * 16, 128), Fraction(2 + 2 * 1, 8 + 2 * 2)),
        ("strange.matrix.weight", (64, 128), Fraction(1)),
    ],
)
def test_a_tensor_s_share_on_four_devices_follows_its_name(name, shape, share):
    layout = Layout(shape_of(CONFIG), Topology(4), (range(2),))
    assert share_of(name, Tensor(name, "BF16", shape, "m", 0, 2), layout)[1] == share


def test_layers_that_only_predict_further_tokens_count_when_they_draft(tmp_path):
    sizes = {"layers": 2, "hidden": 128, "heads": 8, "rank": None, "inner": 256, "expert": 64, "count": 4}
    tensors = list(deepseek(**sizes, shared=1, rows=1000, dense=1, further=1))
    root = made(
        tmp_path / "m",
        tensors,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )
    further = sum(one.size for one in tensors if one.name.startswith("model.layers.2."))
    plain = planned(root)
    drafting = planned(root, draft={"method": "mtp"})
    assert drafting.judged.ledgers[0].weights - plain.judged.ledgers[0].weights == further
    assert any(str(further) in one for one in plain.assumed)
    assert plain.judged.ledgers[0].sequence_bytes == 2 * 576 * 2 * 512
    assert drafting.judged.ledgers[0].sequence_bytes == 3 * 576 * 2 * 512


def test_a_draft_takes_its_weights_and_its_cache(tmp_path):
    root = made(tmp_path / "m")
    made(root / "draft", decoder(**SIZES | {"layers": 1}), num_hidden_layers=1)
    alone = planned(root).judged.ledgers[0]
    both = planned(root, draft={"directory": "draft", "method": "draft_model"}).judged.ledgers[0]
    assert both.draft == 2 * ROWS + LAYER + 256
    assert both.weights == alone.weights
    assert both.sequence_bytes == alone.sequence_bytes * 3 // 2


def test_a_draft_that_cannot_be_divided_is_whole_on_every_device(tmp_path):
    root = made(tmp_path / "m")
    sizes = SIZES | {"layers": 1, "heads": 1, "keys": 1}
    made(root / "draft", decoder(**sizes), num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    asked = {"draft": {"directory": "draft", "method": "draft_model"}}
    one, two = (planned(root, on(layout), **asked).judged.ledgers[0] for layout in ("tp=1", "tp=2"))
    assert one.draft == two.draft == 2 * ROWS + 4 * 32_768 + 2 * 256 + 3 * 65_536 + 256
    # one head of 128, keys and values in 16 bits, on each of both
    assert two.sequence_bytes - planned(root, on("tp=2")).judged.ledgers[0].sequence_bytes == 2 * 128 * 2 * 512


def test_adapters_take_a_slot_each_of_the_largest_at_the_rank_that_is_launched_with(tmp_path):
    root = made(tmp_path / "m")
    for name, rank in (("one", 8), ("two", 16)):
        (root / name).mkdir()
        write_json(root / name / "adapter_config.json", {"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]})
        stem = "base_model.model.model.layers.0.self_attn.q_proj"
        shapes = (("lora_A", (rank, 128)), ("lora_B", (128, rank)))
        tensors = [T(f"{stem}.{half}.weight", "BF16", shape) for half, shape in shapes]
        write_safetensors(root / name / "adapter_model.safetensors", tensors)
    assert planned(root).judged.ledgers[0].adapters == 2 * (2 * 16 * 128 * 2)
    launched = {"name": "vllm", "arguments": ["--max-loras", "4", "--max-lora-rank", "32"]}
    assert planned(root, engine=launched).judged.ledgers[0].adapters == 4 * (2 * 32 * 128 * 2)


# ----------------------------------------------------------------------------------------------- what is published


@pytest.mark.parametrize(
    ("name", "layout", "held", "sequences"),
    [
        # 8,030,261,248 parameters in 16 bits: 51.9 GB of 72 are left
        ("llama-3.1-8b-instruct", "tp=1", 16_060_522_496, 49),
        ("llama-3.1-8b-instruct", "tp=2", 8_030_527_488, 114),
        ("mixtral-8x7b-instruct", "tp=2", 46_704_107_520, 40),
        ("gpt-oss-20b", "tp=1", 13_761_264_768, 271),
    ],
)
def test_published_sizes_on_80_gb_cards(tmp_path, name, layout, held, sequences):
    root = write(tmp_path / "m", FAMILIES[name])
    asked = Asked(Reserve(80 * 10**9, activation_bytes=4 * 10**9), topology=parse(layout), context_tokens=8000)
    found = planned(root, asked, engine={"name": "vllm", "version": "0.32.0"})
    assert weights(found) == [held]
    assert found.judged.judgement.sequences == sequences


def test_mixtral_needs_two_80_gb_cards(tmp_path):
    root = write(tmp_path / "m", FAMILIES["mixtral-8x7b-instruct"])
    asked = Asked(Reserve(80 * 10**9, activation_bytes=4 * 10**9), context_tokens=8000)
    told = as_json(planned(root, asked, engine={"name": "vllm", "version": "0.32.0"}))
    assert told["verdict"] == "does-not-fit"
    assert told["decided_by"]["what"] == "memory"
    assert (told["decided_by"]["found"], told["decided_by"]["expected"]) == (72 * 10**9, 97_405_585_408)
    assert told["smallest"] == {
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "expert_parallel": 1,
        "devices": 2,
    }


# -------------------------------------------------------------------------------------------------------- verdicts


def test_the_verdict_turns_at_the_byte(tmp_path):
    root = made(tmp_path / "m")
    needed = 2 * ROWS + 2 * LAYER + 256 + 2 * 2 * 2 * 16 * 2 * 512
    exact = planned(root, replace(ROOMY, reserve=Reserve(needed, Decimal(1))))
    short = planned(root, replace(ROOMY, reserve=Reserve(needed - 1, Decimal(1))))
    assert (exact.judged.judgement.fits, exact.judged.judgement.sequences) == (True, 1)
    assert (short.judged.judgement.fits, short.judged.judgement.what) == (False, "sequences")
    assert as_json(short)["decided_by"]["found"] == 0
    assert as_json(short)["decided_by"]["expected"] == 1


def test_the_smallest_layout_is_looked_for_among_those_that_are_named(tmp_path):
    root = made(tmp_path / "m")
    room = ROWS * 2 + LAYER * 2 + 256
    asked = replace(ROOMY, reserve=Reserve(room, Decimal(1)), among=(parse("tp=4"), parse("tp=2"), parse("tp=8")))
    found = planned(root, asked)
    assert not found.judged.judgement.fits
    assert found.smallest is not None
    assert found.smallest.topology == Topology(2)
    assert [one.topology.tensor for one in found.tried] == [2, 4, 8]
    assert planned(root, replace(asked, reserve=Reserve(1000, Decimal(1)))).smallest is None


def test_sequences_and_context_are_what_is_declared_unless_asked(tmp_path):
    root = made(tmp_path / "m")
    bare = Asked(Reserve(64 * MIB, Decimal(1)))
    assert planned(root, bare).context_tokens == 512
    told = planned(root, bare, runtime={"context_tokens": 64, "max_sequences": 7})
    assert (told.context_tokens, told.sequences) == (64, 7)
    launched = {"name": "vllm", "arguments": ["--max-model-len", "128"]}
    assert planned(root, bare, engine=launched).context_tokens == 128
    assert planned(root, replace(bare, context_tokens=32, sequences=3), engine=launched).context_tokens == 32


def test_utilization_is_the_launch_argument_s_unless_asked():
    stated = Reserve(100)
    declared = read_declared({"engine": {"name": "vllm", "arguments": ["--gpu-memory-utilization", "0.5"]}})
    assert reserve_of(declared, stated, None).usable_bytes == 50
    assert reserve_of(declared, stated, Decimal("0.25")).usable_bytes == 25
    assert reserve_of(read_declared({}), stated, None).usable_bytes == 90
    for wrong in ("x", "0", "1.5", "NaN"):
        odd = read_declared({"engine": {"name": "vllm", "arguments": ["--gpu-memory-utilization", wrong]}})
        with pytest.raises(PlacementUnknown, match="utilization"):
            reserve_of(odd, stated, None)


def test_a_price_is_of_all_devices_of_the_judged_layout(tmp_path):
    root = made(tmp_path / "m")
    priced = replace(on("tp=2"), price=Decimal(2), rate=Decimal(2400))
    assert as_json(planned(root, priced))["price_per_million_output_tokens"] == "0.4630"
    assert as_json(planned(root))["price_per_million_output_tokens"] is None


def test_the_declared_layout_is_judged(tmp_path):
    root = made(tmp_path / "m")
    assert planned(root, topology={"tensor_parallel": 2, "pipeline_parallel": 2}).judged.topology == Topology(2, 2)
    words = ["--tensor-parallel-size", "2", "--data-parallel-size", "4", "--enable-expert-parallel"]
    declared = read_declared({"engine": {"name": "vllm", "arguments": words}})
    assert declared_topology(declared, shape_of(CONFIG | {"num_experts": 8})) == Topology(2, 1, 8)
    assert declared_topology(declared, shape_of(CONFIG)) == Topology(2, 1, 1)


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (["--tp", "8", "--dp", "8", "--enable-dp-attention"], Topology(1, 1, 8)),
        (["--tp", "8", "--dp", "4", "--enable-dp-attention", "--ep", "8"], Topology(2, 1, 8)),
        (["--tp", "8", "--dp", "1", "--enable-dp-attention"], Topology(8, 1, 1)),
        (["--tp", "8"], Topology(8, 1, 1)),
    ],
)
def test_attention_that_groups_do_for_themselves_is_whole_in_each_and_multiplies_the_cache(words, layout):
    declared = read_declared({"engine": {"name": "sglang", "arguments": words}})
    assert declared_topology(declared, shape_of(CONFIG | {"num_experts": 8})) == layout
    if layout.groups > 1:
        with pytest.raises(PlacementUnknown, match="without experts"):
            declared_topology(declared, shape_of(CONFIG))


# ---------------------------------------------------------------------------------------------------- refused


def cut_index(root):
    write_json(root / "model.safetensors.index.json", {"weight_map": {"gone.weight": "model.safetensors"}})


def cut_shard(root):
    (root / "model.safetensors").rename(root / "model-00001-of-00002.safetensors")


def cut_header(root):
    (root / "model.safetensors").write_bytes(b"\xff" * 64)


def cut_pointer(root):
    (root / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    )


def cut_weights(root):
    (root / "model.safetensors").unlink()


def cut_config(root):
    (root / "config.json").write_text("{")


def cut_tensor(root):
    places = {one.name: "model.safetensors" for one in decoder(**SIZES)} | {"gone.weight": "model.safetensors"}
    write_json(root / "model.safetensors.index.json", {"weight_map": places})


def cut_second(root):
    (root / "more.safetensors").write_bytes(b"\xff" * 64)


def cut_second_to_a_pointer(root):
    cut_pointer(root)
    (root / "model.safetensors").rename(root / "more.safetensors")
    made(root)


def cut_second_to_nothing(root):
    (root / "more.safetensors").touch()


WHOLE_ELSEWHERE = [cut_tensor, cut_second, cut_second_to_a_pointer, cut_second_to_nothing]


@pytest.mark.parametrize(
    "cut", [*WHOLE_ELSEWHERE, cut_index, cut_shard, cut_header, cut_pointer, cut_weights, cut_config]
)
def test_what_is_not_whole_gets_no_plan(tmp_path, cut):
    root = made(tmp_path / "m")
    cut(root)
    with pytest.raises(PlacementUnknown):
        planned(root)


def test_a_divided_context_gets_no_plan(tmp_path):
    with pytest.raises(PlacementUnknown, match="context"):
        planned(made(tmp_path / "m"), topology={"context_parallel": 2})


def test_a_context_that_nobody_tells_gets_no_plan(tmp_path):
    root = made(tmp_path / "m", max_position_embeddings=None, model_type="qwen2")
    with pytest.raises(PlacementUnknown, match="--context"):
        planned(root, Asked(Reserve(64 * MIB)))


@pytest.mark.parametrize(
    ("engine", "arguments", "tokens"),
    [
        (None, [], 64),
        ("vllm", [], 64),
        ("vllm", ["--disable-hybrid-kv-cache-manager"], 512),
        ("sglang", [], 512),
        ("trtllm", [], 512),
        ("external", [], 512),
    ],
)
def test_windows_count_where_the_engine_is_known_to_free_what_leaves_them(tmp_path, engine, arguments, tokens):
    root = made(tmp_path / "m", model_type="mistral", sliding_window=64)
    declared = {} if engine is None else {"engine": {"name": engine, "arguments": arguments}}
    assert planned(root, **declared).judged.ledgers[0].sequence_bytes == 2 * (2 * 2 * 16 * 2) * tokens
    if engine == "sglang":
        again = made(tmp_path / "o", model_type="gpt_oss", sliding_window=64, head_dim=16)
        assert planned(again, **declared).judged.ledgers[0].sequence_bytes == (2 * 2 * 16 * 2) * (64 + 512)


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "token"),
    [
        ("vllm", [], {}, 576 * 2),
        ("vllm", [], {"VLLM_MLA_DISABLE": "1"}, 8 * (192 + 192) * 2),
        ("transformers", [], {}, 8 * 320 * 2),
    ],
)
def test_latents_are_kept_expanded_by_engines_that_do_so(tmp_path, name, arguments, variables, token):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    root = made(tmp_path / "m", **sizes)
    engine = {"name": name, "arguments": arguments, "variables": variables}
    assert planned(root, engine=engine).judged.ledgers[0].sequence_bytes == 2 * token * 512
    if name == "vllm" and not variables:
        root = made(tmp_path / "n", **sizes, model_type="minicpm3")
        assert planned(root, engine=engine).judged.ledgers[0].sequence_bytes == 2 * 8 * (192 + 192) * 2 * 512


# ----------------------------------------------------------------------------------------------------- topology


@pytest.mark.parametrize(
    ("layers", "pipeline", "sizes"),
    [(32, 1, [32]), (32, 4, [8] * 4), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15]), (3, 3, [1, 1, 1])],
)
def test_layers_left_over_go_to_the_stages_before_the_last(layers, pipeline, sizes):
    found = stages(layers, pipeline)
    assert [len(one) for one in found] == sizes
    assert [layer for one in found for layer in one] == list(range(layers))


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("tp=3", {}, "8 attention heads"),
        ("tp=4", {"num_key_value_heads": 3, "num_attention_heads": 12}, "3 key-value heads"),
        ("pp=3", {}, "2 layers"),
        ("ep=2", {}, "no experts"),
        ("ep=8", {"num_experts": 4}, "4 experts"),
        ("tp=2,ep=3", {"num_experts": 6}, "one must divide"),
    ],
)
def test_what_cannot_be_divided_is_no_layout(tmp_path, layout, changes, said):
    assert said in next(obstacles(shape_of(CONFIG | changes), parse(layout)))
    if not changes:
        found = planned(made(tmp_path / "m"), on(layout))
        assert (found.judged.judgement.fits, found.judged.judgement.what) == (False, "layout")


def test_layouts_are_tried_from_the_fewest_devices_on():
    found = candidates(4)
    assert [str(one) for one in found] == [
        *("tp=1", "tp=2", "tp=1,pp=2"),
        *("tp=4", "tp=2,pp=2", "tp=1,pp=4"),
    ]
    assert Topology(4, 1, 4) in candidates(spread_experts=True)
    assert max(one.tensor for one in candidates(64)) == 8


def test_a_replica_s_devices_are_those_of_its_experts_where_they_are_more():
    assert [one.devices for one in (Topology(), Topology(2, 3), Topology(1, 1, 4), Topology(4, 2, 2))] == [1, 6, 4, 8]


@pytest.mark.parametrize("wrong", ["", "4", "tp=0", "tp=2,tp=4", "dp=2", "tp=99999"])
def test_a_layout_that_is_written_otherwise_is_refused(wrong):
    with pytest.raises(PlacementUnknown):
        parse(wrong)


# --------------------------------------------------------------------------------------------------------- GGUF


def u32(key, value):
    return pair(key.encode(), 4, struct.pack("<I", value))


def array(key, *values):
    return pair(key.encode(), 9, struct.pack(f"<IQ{len(values)}I", 4, len(values), *values))


def gguf_file(path, *, name="llama", heads=4, more=()):
    keys = {"block_count": 2, "embedding_length": 64, "context_length": 256}
    pairs = [pair(b"general.architecture", 8, text(name.encode()))]
    pairs += [u32(f"{name}.{key}", value) for key, value in keys.items()]
    count = f"{name}.attention.head_count"
    pairs.append(array(count, *heads) if isinstance(heads, tuple) else u32(count, heads))
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight", "output_norm.weight", "output.weight"]
    tensors = tuple(info(one.encode(), (64, 16), number * 4096) for number, one in enumerate(names))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf(*pairs, *more, tensors=tensors, data=b"\0" * 4096 * len(names)))
    return path.parent


def test_a_gguf_file_is_planned_by_its_metadata_and_cut_by_layers(tmp_path):
    root = gguf_file(tmp_path / "m" / "model.gguf", more=(u32("llama.attention.head_count_kv", 2),))
    asked = replace(ROOMY, context_tokens=256, topology=parse("pp=2"))
    found = planned(root, asked)
    assert weights(found) == [2 * 4096, 3 * 4096]
    # a layer keeps 2 heads of 16, keys and values in 16 bits
    assert [one.sequence_bytes for one in found.judged.ledgers] == [2 * 2 * 16 * 2 * 256] * 2
    assert planned(root, replace(asked, topology=None)).context_tokens == 256
    assert planned(root, replace(asked, topology=parse("tp=2"))).judged.judgement.what == "layout"
    quantized = {"name": "llamacpp", "arguments": ["-ctk", "q8_0", "-ctv", "q8_0"]}
    assert planned(root, asked, engine=quantized).judged.ledgers[0].sequence_bytes == 2 * 2 * 16 * 256 * 34 // 32


def test_heads_of_each_layer_are_read_from_a_gguf_file_s_array(tmp_path):
    more = (array("llama.attention.head_count_kv", 1, 0),)
    found = planned(gguf_file(tmp_path / "m" / "model.gguf", more=more), replace(ROOMY, context_tokens=256))
    assert found.judged.ledgers[0].sequence_bytes == 1 * 2 * 16 * 2 * 256
    assert found.cache.kinds() == {"full": 1, "none": 1}
    root = gguf_file(tmp_path / "n" / "model.gguf", heads=(2, 4), more=more)
    assert planned(root, replace(ROOMY, context_tokens=256)).judged.ledgers[0].sequence_bytes == 1 * 2 * 16 * 2 * 256


def test_a_gguf_file_s_windows_count_where_llamacpp_has_them(tmp_path):
    for name, tokens in (("llama", 512), ("phi3", 512), ("gemma2", 256 + 32)):
        window = u32(f"{name}.attention.sliding_window", 32)
        root = gguf_file(tmp_path / name / "model.gguf", name=name, more=(window,))
        found = planned(root, replace(ROOMY, context_tokens=256))
        assert found.judged.ledgers[0].sequence_bytes == 4 * 2 * 16 * 2 * tokens, name


def test_widths_of_keys_and_values_are_a_gguf_file_s_own(tmp_path):
    more = (u32("llama.attention.key_length", 24), u32("llama.attention.value_length", 8))
    found = planned(gguf_file(tmp_path / "m" / "model.gguf", more=more), replace(ROOMY, context_tokens=256))
    assert found.judged.ledgers[0].sequence_bytes == 2 * 4 * (24 + 8) * 2 * 256


def test_gguf_files_that_are_no_plan_s_are_refused(tmp_path):
    with pytest.raises(PlacementUnknown, match="strange"):
        planned(gguf_file(tmp_path / "a" / "model.gguf", name="strange"))
    root = gguf_file(tmp_path / "b" / "q4.gguf")
    gguf_file(root / "q8.gguf")
    with pytest.raises(PlacementUnknown, match="several"):
        planned(root)
    mixed = gguf_file(made(tmp_path / "c") / "model.gguf")
    assert planned(mixed).judged == planned(made(tmp_path / "d")).judged


def test_published_configurations_all_get_a_cache(tmp_path):
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite-chat", "gemma-3-4b-it"):
        root = write(tmp_path / name, FAMILIES[name])
        assert planned(root, replace(ROOMY, reserve=Reserve(80 * 10**9))).judged.judgement.fits, CONFIGS[name]
