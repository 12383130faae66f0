from pathlib import Path

import pytest

from tests.support.folder_bundles import TEMPLATE, bundle, file, flaws_of
from workers.engines.base import Launch
from workers.engines.transformers import TRANSFORMERS

LAUNCH = Launch(root=Path("/bundle"), port_file=Path("/run/port.json"), host="0.0.0.0", port=8000)


def line(**sections):
    chosen = bundle("transformers", **sections)
    assert TRANSFORMERS.check_bundle(chosen) == []
    argv = TRANSFORMERS.command(chosen, LAUNCH).argv
    assert argv[:2] == ("/bin/sh", "-ec")
    assert flaws_of(chosen, argv, "transformers") == []
    return " ".join(argv[4:])


def problems(**sections):
    return " | ".join(TRANSFORMERS.check_bundle(bundle("transformers", **sections)))


SERVE = "models--chain /bundle transformers serve chain --host 0.0.0.0 --port 8000"
THINKING = {"origin": "file", "file": "chat_template.jinja", "arguments": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, [SERVE, "--continuous-batching"]),
        ({"runtime": {"max_sequences": 1}}, [SERVE]),
        (
            {
                "quantization": {"method": "bnb-4bit"},
                "runtime": {"max_batch_tokens": 512},
                "engine": {"arguments": ["--device", "cuda:0", "--dtype", "bfloat16"], "attention_backend": "sdpa"},
            },
            [
                *(SERVE, "--device cuda:0 --dtype bfloat16 --quantization bnb-4bit --attn-implementation sdpa"),
                "--cb-max-batch-tokens 512 --continuous-batching",
            ],
        ),
        (
            {"template": THINKING, "files": [TEMPLATE], "runtime": {"max_sequences": 1}},
            [SERVE, '--chat-template-kwargs {"enable_thinking": false}'],
        ),
    ],
)
def test_the_command_line_says_what_the_bundle_says(sections, said):
    assert line(**sections) == " ".join(said)


def test_a_name_with_a_slash_is_a_repository_of_the_cache():
    assert line(serving={"served_name": "org/chain"}).startswith(
        "models--org--chain /bundle transformers serve org/chain"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unknown argument --bogus"),
        (["--device", "cuda:0;rm"], "--device cannot be"),
        (["--dtype", "int3"], "must be one of auto"),
        (["--attn-implementation", "evil/kernel"], "is said by engine.attention_backend"),
        (["--trust-remote-code"], "is set from engine.remote_code"),
        (["--continuous-batching"], "is said by runtime.max_sequences"),
        (["--model-timeout", "1"], "would unload the model"),
        (["--enable-cors"], "lets pages of others speak to the engine"),
        (["other/model"], "follows no argument that takes it"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(arguments, says):
    assert says in problems(engine={"arguments": arguments})


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "HF_ENDPOINT", "NCCL_NET_PLUGIN"])
def test_a_variable_that_is_not_allowed_is_refused(name):
    assert f"variable {name} " in problems(engine={"variables": {name: "x"}})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"version": "4.57.0"}, "transformers 4.57.0 is not known here, only >=5.19,<6"),
        ({"engine": {"attention_backend": "evil/kernel"}}, "'evil/kernel' cannot be said as --attn-implementation"),
        ({"topology": {"tensor_parallel": 2}}, "with tensor_parallel 1, not 2"),
        ({"template": {"tool_parser": "hermes"}}, "no parsers that can be named"),
        ({"template": {"origin": "file", "file": "t.jinja"}, "files": [file("t.jinja", "template")]}, "not t.jinja"),
        ({"runtime": {"sampling": {"temperature": "0.7"}}}, "from generation_config.json alone"),
        ({"runtime": {"prefix_caching": True}}, "caches no prefixes"),
        ({"quantization": {"method": "none", "kv_cache": "fp8"}}, "no data type of the cache"),
        ({"draft": {"method": "ngram", "tokens": 2}}, "loads no draft model"),
    ],
)
def test_what_this_engine_cannot_do_is_a_problem_before_anything_starts(sections, says):
    assert says in problems(**sections)
