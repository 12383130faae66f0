"""Neighbours of the incident cases of weights in Mistral's own form: params.json and consolidated files."""

import pytest

from tests.support.checkpoints import T, codes, edit_json, only, validate, write_json, write_safetensors

ASKED = ["--config-format", "mistral", "--load-format", "mistral"]
PARAMS = {"dim": 8, "n_layers": 2, "head_dim": 4, "hidden_dim": 16, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 264}
LAYER = {
    "attention.wq": (8, 8),
    "attention.wk": (4, 8),
    "attention.wv": (4, 8),
    "attention.wo": (8, 8),
    "attention_norm": (8,),
    "ffn_norm": (8,),
    "feed_forward.w1": (16, 8),
    "feed_forward.w2": (8, 16),
    "feed_forward.w3": (16, 8),
}


def consolidated(root, **changes):
    root.mkdir()
    write_json(root / "params.json", PARAMS | {"norm_eps": 1e-5, "rope_theta": 1e6, "max_seq_len": 128} | changes)
    ends = {"tok_embeddings": (264, 8), "norm": (8,), "output": (264, 8)}
    layers = {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
    tensors = [T(f"{name}.weight", "BF16", shape) for name, shape in (ends | layers).items()]
    write_safetensors(root / "consolidated.safetensors", tensors)
    return root


def blocking(root, words=ASKED):
    found = validate(root, {"engine": {"name": "vllm", "version": "0.32.0", "arguments": words}})
    return found, codes(found, "block") & {"shape-mismatch", "embedding-rows", "tensor-missing"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, set()),
        ({"hidden_dim": 32}, {"shape-mismatch"}),
        ({"n_kv_heads": 2}, {"shape-mismatch"}),
        ({"head_dim": 8}, {"shape-mismatch"}),
        ({"vocab_size": 300}, {"embedding-rows"}),
        ({"n_layers": 3}, {"tensor-missing"}),
        ({"moe": {"num_experts": 8}, "hidden_dim": 32}, set()),
    ],
)
def test_c070_consolidated_files_are_those_of_params_json(tmp_path, changes, code):
    assert blocking(consolidated(tmp_path / "m", **changes))[1] == code


def test_c070_what_params_json_makes_is_told_with_its_key(tmp_path):
    flaw = only(blocking(consolidated(tmp_path / "m", n_layers=3))[0], "tensor-missing")
    assert (flaw.file, flaw.pointer, flaw.found["count"]) == ("params.json", "/n_layers", 9)
    flaw = only(blocking(consolidated(tmp_path / "n", hidden_dim=32))[0], "shape-mismatch")
    assert (flaw.found["shape"], flaw.expected["shape"]) == ([16, 8], [32, 8])


def test_c070_params_json_counts_where_the_engine_reads_it(tmp_path):
    root = consolidated(tmp_path / "m", hidden_dim=32)
    assert blocking(root, [])[1] == {"shape-mismatch"}  # as vLLM does by itself where both are there
    assert blocking(root, ["--config-format", "hf"])[1] == set()
    edit_json(root / "params.json", lambda told: told.update(hidden_dim=16))
    assert blocking(root, [])[1] == set()
