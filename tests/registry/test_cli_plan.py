"""`sluicegate bundle plan`: the memory ledger here, of a directory, or of a registered bundle by its headers alone."""

import json
import re
import struct
from pathlib import Path

import pytest

from registry.cli import main
from registry.client.storage import CHUNK_BYTES
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from tests.support.chain import write_bundle_directory
from tests.support.checkpoints import SHARDS, adapt, micro, micro_sharded, micro_tensors
from tests.support.factories import bundle_body, file_entry
from tests.support.families import FAMILIES
from tests.support.headers import safetensors, tensor
from tests.support.published import write
from tests.support.scripted_http import ScriptedHttp, answer

CARD = ("--device-memory", "80GB", "--context", "8000")
VLLM = '{"engine": {"name": "vllm", "version": "0.32.0"}}'


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    root = write(tmp_path_factory.mktemp("llama") / "llama", FAMILIES["llama-3.1-8b-instruct"])
    (root.parent / "bundle.json").write_text(VLLM)
    return root


def run(capsys, *words):
    status = main(["bundle", "plan", *map(str, words)])
    return status, capsys.readouterr()


def test_a_plan_has_every_line_of_the_ledger_for_programs(capsys, llama):
    asked = ("-f", llama.parent / "bundle.json", "--price", "4", "--rate", "2400", "--sequences", "49")
    status, said = run(capsys, llama, *CARD, *asked, "--json")
    told = json.loads(said.out)
    assert (status, told["verdict"], told["sequences"]) == (0, "fits", 49)
    assert told["price_per_million_output_tokens"] == "0.4630"
    assert told["cache"] == {
        "dtype": "bfloat16",
        "layers": {"full": 32},
        "token_bytes": 131_072,
        "windows": [],
        "token_bytes_beyond_windows": 131_072,
        "draft_token_bytes": 0,
        "sequence_bytes": 1_048_576_000,
        "block_tokens": 16,
    }
    (device,) = told["devices"]
    assert {name: device[name] for name in device if name != "weights"} == {
        "stage": 0,
        "device_bytes": 80_000_000_000,
        "usable_bytes": 72_000_000_000,
        "weight_bytes": 16_060_522_496,
        "adapter_bytes": 0,
        "draft_bytes": 0,
        "activation_bytes": 4_000_000_000,
        "graph_bytes": 0,
        "headroom_bytes": 0,
        "cache_room_bytes": 51_939_477_504,
        "sequence_bytes": 1_048_576_000,
        "sequences": 49,
    }
    assert told["smallest"]["devices"] == 1


def test_a_plan_that_does_not_fit_says_the_number_and_the_smallest_layout_that_does(capsys, llama):
    status, said = run(capsys, llama, "--device-memory", "16GiB", "--context", "8000", "--activations", "1GB")
    assert status == 1
    assert "does not fit: a device of stage 0 has 15461882265 usable bytes" in said.out
    assert "16060522496 of them by weights" in said.out
    assert "tp=2 (2 devices)" in said.out
    assert "--activations" not in said.out
    _, said = run(capsys, llama, "--device-memory", "16GiB", "--context", "8000", "--activations", "17GB")
    assert "17000000000 of them by activations\nactivations are what --activations says" in said.out
    status, said = run(capsys, llama, *CARD, "--topology", "tp=3")
    assert status == 1
    assert "STAGE" not in said.out
    assert "does not fit: 32 attention heads cannot be divided over 3 devices" in said.out
    status, said = run(capsys, llama, *CARD, "--sequences", "50", "-f", llama.parent / "bundle.json")
    assert status == 1
    assert "holds 49 sequences of 8000 tokens; wanted: 50" in said.out


def test_what_is_stated_is_taken_from_the_room(capsys, llama):
    stated = ("--activations", "1GiB", "--graphs", "512 MiB", "--headroom", "1000000", "--utilization", "1")
    _, said = run(capsys, llama, *CARD, *stated, "--topology", "tp=4,pp=2", "--json")
    device = json.loads(said.out)["devices"][1]
    reserved = (device["activation_bytes"], device["graph_bytes"], device["headroom_bytes"], device["usable_bytes"])
    assert reserved == (2**30, 2**29, 1_000_000, 80_000_000_000)
    taken = device["weight_bytes"] + 2**30 + 2**29 + 1_000_000
    assert device["cache_room_bytes"] == 80_000_000_000 - taken


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--device-memory"),
        (("--device-memory", "80 apples"), "no size"),
        (("--device-memory", "0"), "is 0 bytes, and has to be from 1.0 MB to 1 PB"),
        (("--device-memory", "80"), "is 80 bytes, and has to be from 1.0 MB to 1 PB: write a unit too, such as 80GB"),
        (("--device-memory", str(10**30)), "to 1 PB"),
        (("--device-memory", "80GB", "--headroom", "2000TB"), "has to be at most 1 PB"),
        (("--device-memory", "1.5B"), "no size"),
        (("--device-memory", "80GB", "--activations", "-1"), "no size"),
        (("--device-memory", "80GB", "--topology", "four"), "no layout"),
        (("--device-memory", "80GB", "--among", "tp=0"), "no layout"),
        (("--device-memory", "80GB", "--price", "4"), "come together"),
        (("--device-memory", "80GB", "--price", "x", "--rate", "1"), "no number"),
        (("--device-memory", "80GB", "--price", "1", "--rate", "0"), "not above 0"),
        (("--device-memory", "80GB", "--price", "-1", "--rate", "1"), "below 0"),
        (("--device-memory", "80GB", "--price", "1e999999", "--rate", "1"), "above 1000000000000"),
        (("--device-memory", "80GB", "--price", "1", "--rate", "1e-999999"), "below 1E-12"),
        (("--device-memory", "80GB", "--utilization", "1.5"), "above 1"),
        (("--device-memory", "80GB", "--topology", f"tp={'9' * 40}"), "tp"),
    ],
)
def test_what_is_written_wrongly_is_usage(capsys, llama, words, said):
    status, told = run(capsys, llama, *words)
    assert status == 2
    assert said in told.err


def test_tokens_of_windows_and_of_a_draft_are_told_apart(capsys, tmp_path):
    alternating = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    tensors = [
        *micro_tensors(),
        *(one._replace(name=one.name.replace("s.0.", "s.1.")) for one in micro_tensors()[1:-2]),
    ]
    root = micro(tmp_path / "m", tensors=tensors, sliding_window=64, **alternating)
    micro(root / "draft")
    (tmp_path / "bundle.json").write_text('{"engine": {"name": "vllm", "version": "0.32.0"}, "draft": "draft"}')
    asked = (root, "--device-memory", "8GB", "--context", "2000", "-f", tmp_path / "bundle.json")
    _, said = run(capsys, *asked, "--json")
    cache = json.loads(said.out)["cache"]
    assert (cache["windows"], cache["token_bytes"], cache["token_bytes_beyond_windows"]) == ([64], 32, 16)
    assert cache["draft_token_bytes"] == 16
    _, said = run(capsys, *asked)
    told = "32 bytes a token in all until windows of 64 tokens are full, 16 from then on; 16 more for the draft"
    assert told in said.out
    assert "tokens of context, at 2,000 a sequence; windowed layers keep the last 64 of each" in said.out


def test_what_is_planned_may_be_a_file_and_what_is_none_is_told(capsys, tmp_path):
    write_bundle_directory(tmp_path / "gguf")
    status, said = run(capsys, tmp_path / "gguf" / "model.gguf", "--device-memory", "8GB", "--json")
    told = json.loads(said.out)
    assert (status, told["verdict"]) == (0, "fits")
    assert "1 layer cannot be divided over 2 stages" in {one["says"] for one in told["tried"]}
    status, said = run(capsys, tmp_path / "nope", "--device-memory", "8GB")
    assert (status, f"there is no directory or file of weights {tmp_path / 'nope'}" in said.err) == (2, True)
    adapt(tmp_path / "lora")
    status, said = run(capsys, tmp_path / "lora", "--device-memory", "8GB")
    assert (status, "this is an adapter, which is planned with its base" in said.err) == (3, True)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (SHARDS, f"has 1 of 2 files of model: {SHARDS[1]} is not there"),
        (("a.safetensors", "b.safetensors"), "from b.safetensors, which is not there"),  # only the index says so
    ],
)
def test_a_shard_that_is_not_there_is_named(capsys, tmp_path, names, says):
    root = micro_sharded(tmp_path / "m", names=names)
    (root / names[1]).unlink()
    status, said = run(capsys, root, *CARD)
    assert (status, says in said.err) == (3, True)


def test_what_decides_and_is_not_known_is_no_verdict(capsys, llama, tmp_path):
    (tmp_path / "bundle.json").write_text('{"engine": {"name": "vllm", "arguments": ["--kv-cache-dtype", "fp3"]}}')
    status, said = run(capsys, llama, *CARD, "-f", tmp_path / "bundle.json", "--json")
    told = json.loads(said.out)
    assert (status, told["verdict"]) == (3, "errored")
    assert "fp3" in told["reason"]


def test_layouts_are_tried_where_they_are_named(capsys, llama):
    _, said = run(capsys, llama, *CARD, "--among", "tp=4", "--among", "tp=2,pp=2", "--json")
    told = json.loads(said.out)
    assert [(one["tensor_parallel"], one["pipeline_parallel"]) for one in told["tried"]] == [(4, 1), (2, 2)]
    # the judged layout fits and is smaller than any of these
    assert told["smallest"]["devices"] == 1


# -------------------------------------------------------------------------------------------- a registered bundle

CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "torch_dtype": "bfloat16",
    }
).encode()
FRONT = CHUNK_BYTES
"""Bytes of a weight file that are ever sent here, of eight times as many."""


def registered():
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
    size = (8 * FRONT) // 3 // 4 * 4
    weights = safetensors(
        {name: tensor(place * size, (place + 1) * size) for place, name in enumerate(names)}, b"\0" * FRONT
    )
    length = 8 + struct.unpack_from("<Q", weights)[0] + 3 * size
    files = [
        file_entry("config.json", CONFIG, "config"),
        file_entry("model.safetensors", weights, "weights") | {"size": length},
    ]
    body = bundle_body(
        files=files,
        model={"format": "safetensors", "architecture": "llama"},
        hardware={"accelerator": "nvidia-h100", "count": 1, "memory_bytes": 2**30},
    )
    return Bundle.model_validate(body), weights[:FRONT], length, 3 * size


def service(bundle, weights, length):
    def script(asked):
        if "/v1/bundles/" in asked.path:
            told = {
                "digest": bundle.digest,
                "name": bundle.name,
                "schema_id": Bundle.SCHEMA_ID,
                "created_at": "2026-01-01T00:00:00Z",
                "created_by": "someone",
                "document": bundle.model_dump(mode="json", by_alias=True, exclude_none=True),
                "serving_digest": bundle.serving_digest,
                "components": bundle.components(),
                "labels": None,
                "quarantine": None,
                "locks": None,
                "aliases": None,
            }
            return answer(200, json.dumps(told).encode())
        if asked.path.endswith(sha256_digest(CONFIG)):
            return answer(200, CONFIG, kind="application/octet-stream")
        # The rest never comes: whoever needs more than the header is left without.
        return answer(200, weights, kind="application/octet-stream", length=length)

    return script


def test_a_registered_bundle_is_planned_by_its_headers(command):
    bundle, front, length, stored = registered()
    with ScriptedHttp(service(bundle, front, length)) as http:
        command.use(http.url, "token")
        told = command.ok("bundle", "plan", bundle.digest, "--activations", "0", "--json").json
    (device,) = told["devices"]
    assert device["weight_bytes"] == stored
    assert device["device_bytes"] == 2**30
    assert (told["context_tokens"], told["wanted_sequences"]) == (512, 4)
    # keys and values of one head of 32, in the 16 bits of llama.cpp
    assert told["cache"]["token_bytes"] == 2 * 32 * 2


def test_a_registered_bundle_says_everything_itself(command, tmp_path):
    (tmp_path / "bundle.json").write_text("{}")
    ran = command("bundle", "plan", "0" * 64, "-f", tmp_path / "bundle.json", "--device-memory", "1GB")
    assert ran.status == 2
    assert "a bundle says everything itself" in ran.err


def test_the_example_of_the_readme_is_what_the_command_says(command, llama):
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    section = readme.split("\n## Placement plan\n", 1)[1].split("\n## ", 1)[0]
    asked = section.split(" at `", 1)[1].split("`", 1)[0].split()
    shown = [line.rstrip() for line in section.split("```\n")[2].splitlines()]
    ran = command.ok("bundle", "plan", llama, "-f", llama.parent / "bundle.json", *asked)
    assert [line.rstrip().replace(str(llama), "llama") for line in ran.out.splitlines()] == shown
    usage = command.ok("bundle", "plan", "--help").out
    for option in set(re.findall(r"--[a-z-]+", section.split("```")[1])):
        assert f"{option} " in usage, option
