"""What an engine says of itself, held against its bundle: no engine runs here, its pages are written by hand."""

import json

import pytest

from gates.booted.comparison import ITEMS, compare
from gates.booted.expected import Wanted, wanted
from gates.booted.told import Said, pages, read, reports, table
from gates.dialects.table import DIALECTS
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from schemas.result import Severity
from schemas.runner import Agreement
from tests.support import chain
from tests.support.folder_bundles import TEMPLATE, VERSIONS, body
from tests.support.speech import SPEECHES

NONE = "sha256:" + "0" * 64
CACHE = (
    'vllm:cache_config_info{{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="{engine}",'
    'num_gpu_blocks="{blocks}",note="a \\"quoted\\" word"}} 1.0\n'
)


def page(body):
    return json.dumps(body).encode()


def said_by(engine, flaw=None):
    """Return what a scripted engine says, with some values of its pages replaced."""
    extras = {path: dict(told) | (flaw or {}) for path, told in (SPEECHES[engine].extras or {}).items()}
    return read(engine, {path: page(told) for path, told in extras.items()})


def bundle(engine, **sections):
    document = body(engine, version=VERSIONS.get(engine, "0.32.0"))
    for name, values in sections.items():
        document[name] = {**document[name], **values}
    return Bundle.model_validate(document)


def outcomes(found):
    return {row.item: row.outcome for row in found.rows}


# ------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("engine", sorted(DIALECTS))
def test_every_kind_of_engine_has_rows_with_a_source_for_things_that_are_compared(engine):
    assert len(table(engine)["source"]) > 20
    rows = reports(engine)
    assert {row.item for row in rows} <= set(ITEMS)
    assert len(set(rows)) == len(rows)
    assert all(row.form == "adapters" or bool(row.at) != bool(row.label) for row in rows)
    assert pages(engine) == sorted({row.page for row in rows})
    told = [*table(engine).get("defaults", ()), *table(engine).get("rewrites", ())]
    assert all(len(one["source"]) > 20 for one in told)


def test_an_engine_of_no_table_says_nothing():
    assert (reports("unknown"), read("unknown", {"/version": b"{}"})) == ((), {})


@pytest.mark.parametrize("odd", [[], {}, ["awq"], True, 7, 10**400], ids=lambda odd: str(odd)[:9])
def test_what_is_no_text_is_taken_for_none(odd):
    for engine in DIALECTS:
        for row in (row for row in reports(engine) if row.form in {"word", "text", "digest"} and row.at):
            told = odd
            for step in reversed(row.at):
                told = [told] if step == "0" else {step: told}
            assert row.item not in read(engine, {row.page: page(told)})


def test_numbers_that_no_engine_has_are_not_taken():
    params = {"temperature": 10**400, "top_p": float("inf"), "top_k": float("nan")}
    told = page({"default_generation_settings": {"n_ctx": 10**400, "params": params}, "total_slots": 10**400})
    assert read("llamacpp", {"/props": told}) == {}
    metric = f'vllm:cache_config_info{{kv_cache_size_tokens="{"9" * 5000}"}} 1.0\n'
    assert read("vllm", {"/metrics": metric.encode()}) == {}


# ------------------------------------------------------------------------------------------- scripted engines

SAY = {"sglang": ("context_length", "context_tokens"), "tgi": ("max_total_tokens", "context_tokens")}


@pytest.mark.parametrize("engine", ["sglang", "tgi", "trtllm"])
def test_the_version_that_an_engine_tells_is_held_to_the_bundles(engine, tmp_path):
    should = wanted(bundle(engine), tmp_path, ())
    assert outcomes(compare(said_by(engine), should))["version"] is Agreement.EQUAL
    found = compare(said_by(engine, {"version": "9.9.9"}), should)
    (one,) = found.blocking
    assert (one.code, one.found, one.expected) == ("engine-version-differs", "9.9.9", VERSIONS[engine])
    assert "9.9.9" in one.message
    assert VERSIONS[engine] in one.message
    assert one.advice


@pytest.mark.parametrize("engine", sorted(SAY))
def test_the_context_that_an_engine_tells_is_held_to_the_bundles(engine, tmp_path):
    key, item = SAY[engine]
    tokens = said_by(engine)[item].value
    should = wanted(bundle(engine, runtime={"context_tokens": int(tokens)}), tmp_path, ())
    assert compare(said_by(engine), should).blocking == []
    for other in (int(tokens) - 1, int(tokens) + 1, 1):
        (one,) = compare(said_by(engine, {key: other}), should).blocking
        assert (one.code, one.found, one.expected) == ("context-differs", str(other), tokens)


def test_sglang_is_held_to_its_arguments_and_sections(tmp_path):
    told = {
        "model_path": "/model",
        "max_running_requests": 4,
        "max_total_num_tokens": 16384,
        "chat_template": None,
        "sampling_defaults": "model",
        "quantization": "awq",
        "kv_cache_dtype": "auto",
        "disable_radix_cache": True,
    }
    words = ("python3", "--model-path", "/other", "--sampling-defaults", "openai", "--tp-size", "1")
    one = bundle(
        "sglang",
        runtime={"context_tokens": 4096, "max_sequences": 8, "prefix_caching": True},
        topology={"tensor_parallel": 2},
    )
    found = compare(said_by("sglang", told), wanted(one, tmp_path, words))
    assert {(each.code, each.severity, each.found, each.expected) for each in found.findings} == {
        ("model-path-differs", Severity.BLOCK, "/model", "/other"),
        ("sampling-differs", Severity.BLOCK, "model", "openai"),
        ("slots-differ", Severity.WARN, "4", "8"),
        ("kv-tokens-below-plan", Severity.WARN, "16384", "at least 32768"),
        ("quantization-differs", Severity.WARN, "awq", "none"),
        ("layout-differs", Severity.WARN, "1", "2"),
        ("prefix-caching-differs", Severity.WARN, "false", "true"),
    }
    rows = outcomes(found)
    assert rows["template_file"] is rows["kv_cache"] is Agreement.NOT_DECLARED
    assert rows["template"] is rows["tokenizer"] is rows["arguments"] is Agreement.NOT_REPORTED


@pytest.mark.parametrize("engine", ["transformers", "external", "trtllm", "vllm"])
def test_what_an_engine_does_not_say_is_told_as_that_and_never_as_equal(engine, tmp_path):
    found = compare({}, wanted(bundle(engine), tmp_path, ()))
    assert found.findings == ()
    assert set(outcomes(found).values()) == {Agreement.NOT_REPORTED}
    asked = {"version", "arguments", "model", "context_tokens", "kv_tokens", "template", "tokenizer", "sampling"}
    assert asked <= set(outcomes(found))
    assert all(row.found is None for row in found.rows)


@pytest.mark.parametrize("told", [b"", b"[]", b"{", b"null", b'{"version": 3}', b'{"version": ""}', b"[" * 100_000])
def test_a_page_of_another_form_says_nothing(told):
    assert read("trtllm", {"/version": told}) == {}


def test_vllms_cache_is_read_from_the_labels_of_its_metric():
    said = read("vllm", {"/metrics": CACHE.format(engine=0, blocks=100).encode()})
    assert (said["kv_tokens"].value, said["kv_cache"].value, said["prefix_caching"].value) == ("1600", "auto", "true")
    newer = CACHE.replace("note=", 'kv_cache_size_tokens="900",note=')
    assert read("vllm", {"/metrics": newer.format(engine=0, blocks=100).encode()})["kv_tokens"].value == "900"
    several = CACHE.format(engine=0, blocks=100) + CACHE.format(engine=1, blocks=7)
    assert read("vllm", {"/metrics": several.encode()})["kv_tokens"].value == "112"
    assert (
        read("vllm", {"/metrics": newer.replace("900", "None").format(engine=0, blocks=1).encode()})["kv_tokens"].value
        == "16"
    )
    for broken in (b"", b"vllm:cache_config_info 1.0\n", CACHE.format(engine=0, blocks="None").encode()):
        assert "kv_tokens" not in read("vllm", {"/metrics": broken})


@pytest.mark.parametrize(
    ("version", "wants", "agrees"),
    [
        ("0.32.0", "0.32.0", True),
        ("0.32.0+cpu", "0.32.0", True),
        ("0.32.0", "0.32.0+cpu", False),
        ("0.32.0.post1", "0.32.0", False),
        ("0.32.1", "0.32.0", False),
        ("nightly", "nightly", True),
        ("nightly", "0.32.0", False),
    ],
)
def test_a_version_is_the_one_that_is_meant_whatever_its_build_is_called(version, wants, agrees):
    found = compare({"version": Said(version, "GET")}, {"version": Wanted(wants, "engine.version", "version")})
    assert (found.findings == ()) is agrees


def test_a_cache_in_which_no_request_fits_whole_blocks_and_a_small_one_is_a_warning():
    should = {"kv_tokens": Wanted("512", "runtime.context_tokens", "least", enough=2048)}
    for tokens, codes in ((511, ["kv-tokens-short"]), (2047, ["kv-tokens-below-plan"]), (2048, []), (9999, [])):
        found = compare({"kv_tokens": Said(str(tokens), "GET")}, should)
        assert [one.code for one in found.findings] == codes
        assert bool(found.blocking) is (tokens < 512)
        assert outcomes(found)["kv_tokens"] is (Agreement.DIFFERS if tokens < 512 else Agreement.EQUAL)


def test_a_model_that_is_missing_blocks_and_one_too_many_is_a_warning_but_not_of_an_endpoint_of_others():
    should = {"model": Wanted("chain, german", "serving.served_name", "names")}

    def codes(served, **more):
        return [(one.code, one.severity) for one in compare({"model": Said(served, "list")}, should, **more).findings]

    assert codes("german, chain") == []
    assert codes("chain") == [("model-differs", Severity.BLOCK)]
    assert codes("chain, german, other") == [("models-beyond", Severity.WARN)]
    assert codes("chain, german, other", is_reported=True) == []


def test_a_command_line_may_have_lost_the_words_of_a_wrapper_and_no_other():
    words = ["guard", "1", "python", "serve", "--temp", "0.5"]
    should = {"arguments": Wanted("\n".join(words), "driver", "tail")}

    def found(*seen):
        return compare({"arguments": Said("\n".join(seen), "its process")}, should).findings

    assert found(*words) == found(*words[2:]) == ()
    (one,) = found("python", "serve", "--temp", "1.5")
    assert (one.code, one.found, one.expected) == ("arguments-differ", "--temp 1.5", "guard 1 --temp 0.5")
    assert [each.code for each in found(*words, "--more")] == ["arguments-differ"]
    assert [each.code for each in found("python", "serve", "0.5", "--temp")] == ["arguments-differ"]


def test_of_what_is_lenient_a_difference_is_a_warning():
    should = {"slots": Wanted("4", "runtime"), "context_tokens": Wanted("4", "runtime")}
    said = {"slots": Said("3", "GET"), "context_tokens": Said("3", "GET")}
    assert [one.code for one in compare(said, should).blocking] == ["context-differs"]
    assert compare(said, should, lenient=("context_tokens",)).blocking == []


# ------------------------------------------------------------------------------------------------- from files


def described(root, template, **changes):
    chain.write_chain(root / "model.gguf", **changes)
    (root / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    return chain.describe(root, environment=NONE)


def test_a_template_is_wanted_as_the_engine_reads_and_rewrites_it(tmp_path):
    rules = table("llamacpp")["rewrites"]
    for place, text in enumerate(
        ["a\r\nb", "a\n\n", "a\r\n", *(f"{' '.join(one['has'])} {one['from']} end" for one in rules)]
    ):
        root = tmp_path / str(place)
        root.mkdir()
        should = wanted(described(root, text), root, ())["template"]
        read_as = {"a\r\nb": "a\nb", "a\n\n": "a\n", "a\r\n": "a"}.get(text, text)
        for rule in rules:
            read_as = read_as.replace(rule["from"], "{%- if false %}")
        assert should.value == sha256_digest(read_as.encode())
        assert should.source == "file chat_template.jinja"


def test_sampling_is_wanted_by_argument_then_by_the_file_then_by_the_engines_own_default(tmp_path):
    one = described(tmp_path, "x", metadata={"general.sampling.temp": 1.5, "general.sampling.top_k": 7})
    should = wanted(one, tmp_path, ("serve", "--top-k", "9", "--min-p", "0.10"))
    values = {name: (told.value, told.source) for name, told in should.items() if name.startswith("sampling.")}
    assert values == {
        "sampling.temperature": ("1.5", "file model.gguf general.sampling.temp"),
        "sampling.top_k": ("9", "argument --top-k"),
        "sampling.min_p": ("0.1", "argument --min-p"),
        "sampling.top_p": ("0.95", "the engine's own default"),
        "sampling.repetition_penalty": ("1", "the engine's own default"),
    }
    newer = one.model_copy(update={"engine": one.engine.model_copy(update={"version": "2031.1.1"})})
    assert "sampling.top_p" not in wanted(newer, tmp_path, ())  # nobody looked at what that one does


def test_a_template_of_the_tokenizers_configuration_is_wanted_as_it_is_there(tmp_path):
    files = [{**TEMPLATE, "path": "tokenizer_config.json", "role": "tokenizer"}]
    one = Bundle.model_validate(body("sglang", files=files))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "hello\r\n"}))
    assert wanted(one, tmp_path, ())["template"].value == sha256_digest(b"hello\r\n")


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_the_tokens_that_begin_and_end_a_text_are_wanted_as_the_tokenizer_says_them(tmp_path, eos):
    files = [{**TEMPLATE, "path": "tokenizer_config.json", "role": "tokenizer"}]
    one = Bundle.model_validate(body("vllm", version="0.32.0", files=files))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": eos}))
    should = wanted(one, tmp_path, ())
    assert (should["eos_token"].value, "bos_token" in should) == ("</s>", False)
    said = read("vllm", {"/tokenizer_info": page({"eos_token": "<|end|>", "chat_template": "x"})})
    (found,) = compare(said, should).blocking
    assert (found.code, found.found, found.expected) == ("tokenizer-differs", "<|end|>", "</s>")
    overridden = [*files, {**TEMPLATE, "path": "special_tokens_map.json", "role": "tokenizer"}]
    assert "eos_token" not in wanted(
        Bundle.model_validate(body("vllm", version="0.32.0", files=overridden)), tmp_path, ()
    )


def test_files_that_cannot_be_read_say_nothing(tmp_path):
    one = described(tmp_path, "x")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    other = one.model_copy(update={"name": "other"})
    assert "vocabulary" not in wanted(other, tmp_path, ())
    assert wanted(other, tmp_path, ())["context_tokens"].value == "512"


def test_a_file_that_cannot_be_read_is_told_and_what_others_say_is_held_all_the_same(tmp_path):
    one = described(tmp_path, "x")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    should = wanted(one.model_copy(update={"name": "unread"}), tmp_path, ())
    assert should["template"].value == sha256_digest(b"x")
    found = compare({"template": Said(sha256_digest(b"y"), "/props")}, should).findings
    assert [(each.code, each.severity) for each in found] == [
        ("template-differs", Severity.BLOCK),
        ("files-unread", Severity.WARN),
    ]
    assert found[1].found.startswith("weights: ")
