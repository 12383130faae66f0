"""Adapters in GGUF: told apart from models, taken into bundles for llama.cpp, held against their base, and counted."""

import shutil
from decimal import Decimal

import numpy as np
import pytest

from gates.directory import DirectoryRefused, read_directory
from gates.files.contents import Reader, select
from gates.inference import EngineChoice, bundle_document
from gates.placement.ledger import Reserve
from gates.placement.plan import Asked, plan
from gates.sources.parts import choose
from gates.sources.source import SourceRefused
from gates.static import adapters, values
from gates.static.composition import of_directory, of_files
from gates.static.declared import read_declared
from gates.static.examine import examine
from schemas.bundle import Bundle, Role
from tests.support import chain
from tests.support.checkpoints import alarms, codes, micro, only, validate
from tests.support.packed_adapter import LOUD, MUTE, matrices, write_adapter

LLAMACPP = EngineChoice("llamacpp", "2026.10.11549", "sha256:" + "0" * 64)
ENGINE = {"engine": {"name": "llamacpp", "version": "2026.10.11549"}}
TUNED = ENGINE | {"adapters": {"tuned": "tuned"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return chain.write_bundle_directory(tmp_path_factory.mktemp("base") / "m") / "model.gguf"


@pytest.fixture
def put(base, tmp_path):
    """Lay CHAIN with one adapter beside it."""

    def beside(pairs=None, *, folder="tuned", file="tuned.gguf", **options):
        shutil.copyfile(base, tmp_path / "model.gguf")
        write_adapter(tmp_path / folder / file, matrices(LOUD) if pairs is None else pairs, **options)
        return tmp_path

    return beside


def altered(**changes):
    """Return LOUD's matrices with some replaced, by the ends of their names; None takes one away."""
    pairs = matrices(LOUD)
    for end, shape in changes.items():
        name = f"blk.0.{end.replace('__', '.weight.')}"
        pairs.pop(name, None)
        if shape is not None:
            pairs[name] = np.full(shape, 0.05, np.float32)
    return pairs


def checked(root, declared=TUNED):
    """Return what the checks of adapters find."""
    return list(adapters.check(of_directory(root, read_declared(declared))))


# ------------------------------------------------------------------------------------------------- the static gate


def test_an_adapter_that_fits_its_base_is_sound(put):
    found = validate(put(), TUNED)
    assert alarms(found) == set()
    assert found.inferred["adapters"] == ["tuned"]


def test_one_that_lies_where_a_bundle_has_it_is_found_without_being_named(put):
    found = validate(put(folder="adapters/de"), ENGINE)
    assert (alarms(found), found.inferred["adapters"]) == (set(), ["de"])


def test_an_embedding_s_matrices_lie_the_other_way_round(put):
    shape = (chain.VOCABULARY_SIZE, chain.HIDDEN)
    pairs = {
        "token_embd.weight.lora_a": np.full((shape[0], 8), 0.1, np.float32),
        "token_embd.weight.lora_b": np.full((shape[1], 8), 0.1, np.float32),
    }
    assert checked(put(pairs)) == []
    pairs["token_embd.weight.lora_a"] = np.full((shape[0] + 1, 8), 0.1, np.float32)
    (found,) = checked(put(pairs))
    assert (found.code, found.expected) == ("lora-shape", f"[{shape[0]}, 8]")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((4, 8, 16), (4, 32, 8), None),
        ((2, 8, 16), (4, 32, 8), "a matrix for each of the 4 experts"),
        ((4, 8, 16), (2, 32, 8), "a matrix for each of the 4 experts"),
        ((8, 16), (32, 8), "a matrix for each of the 4 experts"),
        ((4, 8, 16), (4, 31, 8), "[32, 8]"),
        ((4, 6, 16), (4, 32, 8), "the rank 8 of matrix B"),
    ],
)
def test_experts_have_a_pair_each(tmp_path, a, b, expected):
    stem = "blk.0.ffn_up_exps.weight"
    base = {stem: np.zeros((4, 32, 16), np.float32)}
    write_adapter(tmp_path / "model.gguf", base, kind="model", adapter_type=None, alpha=None)
    pairs = {f"{stem}.lora_a": np.ones(a, np.float32), f"{stem}.lora_b": np.ones(b, np.float32)}
    write_adapter(tmp_path / "tuned" / "tuned.gguf", pairs)
    assert [one.expected for one in checked(tmp_path)] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"kind": "model"}, "lora-kind-unsupported", "says model for general.type"),
        ({"kind": None}, "lora-kind-unsupported", "says no general.type"),
        ({"adapter_type": "control_vector"}, "lora-kind-unsupported", "says control_vector for adapter.type"),
        ({"adapter_type": None}, "lora-kind-unsupported", "says no adapter.type"),
        ({"architecture": "qwen2"}, "lora-no-match", "for the architecture qwen2, and the base is llama"),
        ({"alpha": None}, "adapter-incomplete", "says no adapter.lora.alpha"),
        ({"alpha": 0.0}, "adapter-incomplete", "says adapter.lora.alpha 0"),
        ({"alpha": -16.0}, "adapter-incomplete", "says adapter.lora.alpha -16"),
        ({"alpha": float("nan")}, "adapter-incomplete", "says adapter.lora.alpha nan"),
        ({"invocation": (-1, 110)}, "lora-kind-unsupported", "a list of u32 alone"),
    ],
)
def test_a_header_that_the_engine_does_not_take_blocks_with_its_key(put, options, code, says):
    (found,) = checked(put(**options))
    assert (found.code, found.severity) == (code, "block")
    assert says in found.message


@pytest.mark.parametrize(
    ("pairs", "code", "says"),
    [
        ({}, "lora-no-match", "has no pair of matrices"),
        (altered(attn_v__lora_b=None), "adapter-incomplete", "1 of 2 tensors has one of two matrices"),
        (altered(attn_v__lora_a=(4, 320)), "lora-shape", "the rank 8 of matrix B"),
        (altered(attn_v__lora_a=(8, 300)), "lora-shape", "[8, 320] is needed"),
        (altered(attn_v__lora_b=(65, 8)), "lora-shape", "[64, 8] is needed"),
        (altered(attn_v__lora_a=(320,)), "lora-shape", "two dimensions"),
        (altered(attn_w__lora_a=(8, 320), attn_w__lora_b=(64, 8)), "lora-no-match", "2 of 3 tensors"),
        (
            {**matrices(LOUD), "blk.0.attn_q.bias": np.zeros(4, np.float32)},
            "lora-kind-unsupported",
            "refuses the adapter",
        ),
        (
            matrices(LOUD | MUTE | {"attn_v": 0.0, "attn_output": 0.0, "attn_q": 0.0}),
            "adapter-no-effect",
            "each of 3 pairs",
        ),
        (
            {name: one.astype(np.int32) for name, one in matrices({"attn_v": 1}).items()},
            "lora-kind-unsupported",
            "does not multiply with",
        ),
    ],
)
def test_matrices_that_do_not_fit_block_with_what_would(put, pairs, code, says):
    found = checked(put(pairs))
    assert any(says in one.message for one in found if (one.code, one.severity) == (code, "block")), found


def test_what_the_engine_leaves_out_or_puts_off_is_a_warning(put):
    norm = {**matrices(LOUD), "blk.0.attn_norm.weight": np.ones(chain.HIDDEN, np.float32)}
    for found in (checked(put(norm)), checked(put(invocation=(77, 110)))):
        assert [(one.code, one.severity) for one in found] == [("lora-kind-unsupported", "warn")]


def test_numbers_that_are_none_are_found_in_an_adapter_too(put):
    root = put({name: one * np.nan for name, one in matrices(LOUD).items()})
    assert {one.code for one in values.check(of_directory(root, read_declared(TUNED)))} == {"non-finite-weight"}


def test_a_file_that_is_cut_off_blocks_once(put):
    path = put() / "tuned" / "tuned.gguf"
    path.write_bytes(path.read_bytes()[:-64])
    assert codes(validate(path.parents[1], TUNED), "block") == {"header-invalid"}


def test_of_two_files_of_one_adapter_nobody_can_choose(put):
    put()
    (found,) = checked(put(file="other.gguf"))
    assert (found.code, found.found) == ("adapter-incomplete", ["other.gguf", "tuned.gguf"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", None])
def test_an_engine_that_serves_safetensors_is_given_no_such_adapter(tmp_path, engine):
    root = micro(tmp_path / "m")
    write_adapter(root / "tuned" / "tuned.gguf", matrices(LOUD))
    (found,) = checked(root, {"adapters": {"tuned": "tuned"}} | ({"engine": engine} if engine else {}))
    assert (found.code, found.file) == ("format-unsupported", "tuned/tuned.gguf")
    assert (found.found, found.expected) == ("gguf", "safetensors")


def test_an_adapter_alone_is_no_model(put, tmp_path):
    write_adapter(tmp_path / "x" / "tuned.gguf", matrices(LOUD))
    found = validate(tmp_path / "x", ENGINE)
    assert "adapter without its base" in only(found, "weights-absent").message


# ------------------------------------------------------------------------------------------------- into a bundle


def document(root):
    contents = read_directory(root, LLAMACPP.reader())
    return Bundle.model_validate(bundle_document(contents, name="chain", engine=LLAMACPP))


def test_a_bundle_takes_it_with_its_rank_and_targets_and_it_is_no_weights(put):
    root = put(folder="adapters/de", file="de-f16.gguf")
    bundle = document(root)
    assert [one.model_dump(exclude_none=True) for one in bundle.adapters] == [
        {
            "name": "de",
            "files": ["adapters/de/de-f16.gguf"],
            "rank": 8,
            "target_modules": ["attn_output", "attn_v"],
        }
    ]
    assert [file.path for file in bundle.weights()] == ["model.gguf"]
    assert alarms(examine(of_files(bundle, {one.path: root / one.path for one in bundle.files}))) == set()


def test_a_bundle_whose_adapter_lies_beside_the_weights_keeps_them_apart(put):
    root = put(folder="adapters/de", file="de.gguf")
    told = document(root).model_dump(mode="json", by_alias=True, exclude_none=True)
    for file in told["files"]:
        file["path"] = file["path"].rpartition("/")[2]
    told["adapters"][0]["files"] = ["de.gguf"]
    told["files"].sort(key=lambda file: file["path"])
    (root / "adapters/de/de.gguf").rename(root / "de.gguf")
    bundle = Bundle.model_validate(told)
    found = examine(of_files(bundle, {one.path: root / one.path for one in bundle.files}))
    assert codes(found, "block") == set()
    assert found.inferred["weights"]["files"] == ["model.gguf"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"kind": "model"}, "adapter-kind"),
        ({"kind": None}, "adapter-kind"),
        ({"adapter_type": None}, "adapter-kind"),
        ({"adapter_type": "control_vector"}, "adapter-kind"),
        ({"pairs": {}}, "adapter-config"),
    ],
)
def test_what_lies_in_an_adapter_s_place_and_is_none_is_refused(put, options, code):
    with pytest.raises(DirectoryRefused) as refused:
        document(put(folder="adapters/de", **options))
    assert [(one.code, one.file) for one in refused.value.refusals] == [(code, "adapters/de/tuned.gguf")]


def test_an_adapter_in_the_place_of_the_model_is_refused(tmp_path):
    write_adapter(tmp_path / "model.gguf", matrices(LOUD))
    with pytest.raises(DirectoryRefused) as refused:
        document(tmp_path)
    assert [one.code for one in refused.value.refusals] == ["adapter-as-model"]


PEFT = ["adapters/de/adapter_config.json", "adapters/de/adapter_model.safetensors"]


@pytest.mark.parametrize(("engine", "taken"), [("llamacpp", ["adapters/de/de.gguf"]), ("vllm", PEFT)])
def test_of_both_formats_the_engine_s_own_is_taken(engine, taken):
    weights = "model.gguf" if engine == "llamacpp" else "model.safetensors"
    found = select([weights, *PEFT, "adapters/de/de.gguf"], Reader(engine))
    assert sorted(path for path, role in found.kept.items() if role is Role.ADAPTER) == sorted(taken)
    assert {one.code for one in found.left_out} == {"other-format"}
    alone = select([weights, *PEFT], Reader(engine))
    assert set(PEFT) <= alone.kept.keys()


def test_a_source_brings_the_one_file_that_llama_cpp_reads():
    reader, files = Reader("llamacpp"), ["de-lora.gguf", "README.md", "adapter_config.json"]
    for one in (reader, Reader("external")):
        found = choose("adapter:de", files, one)
        assert [(one.placed, one.role) for one in found.taken] == [("adapters/de/de-lora.gguf", Role.ADAPTER)]
    with pytest.raises(SourceRefused) as refused:
        choose("adapter:de", ["de-f16.gguf", "de-q8_0.gguf"], reader)
    assert (refused.value.code, refused.value.found) == ("adapter-ambiguous", "de-f16.gguf, de-q8_0.gguf")


# ------------------------------------------------------------------------------------------------------- the plan


def test_each_adapter_takes_its_own_bytes_beside_the_weights(put):
    put(matrices(MUTE, rank=4), folder="mute")
    root = put()
    declared = read_declared(ENGINE | {"adapters": {"tuned": "tuned", "mute": "mute"}})
    asked = Asked(Reserve(2**20, Decimal(1)), context_tokens=512)
    planned = plan(of_directory(root, declared), asked)
    ledger = planned.judged.ledgers[0]
    assert "Adapters are counted whole on every device, each with its own bytes." in planned.assumed
    wanted = sum(one.nbytes for part in (matrices(LOUD), matrices(MUTE, rank=4)) for one in part.values())
    assert ledger.adapters == wanted
