"""The gate `static`: its catalogue, its result from stored records, and how it is recomputed."""

import ast
import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from gates import catalog
from gates.gate import GateContext
from gates.static import contents, examine, listing, rules
from gates.static.catalogue import CODES
from gates.static.flaw import flaw, read_flaw
from gates.static.gate import as_finding
from gates.static.rules import capability, is_within
from schemas.common import canonical_json
from schemas.policy import StaticRule
from schemas.result import Finding, Severity, Verdict
from tests.support import chain
from tests.support.checkpoints import codes, edit_json, micro, micro_sharded, speak, validate

RULE = StaticRule(gate="static")
STATIC = Path(examine.__file__).parent


def context(tmp_path, **options):
    root = chain.write_bundle_directory(tmp_path / "chain", **options)
    return GateContext(bundle=chain.describe(root, environment="sha256:" + "0" * 64), root=root, rule=RULE)


def test_a_sound_bundle_passes_and_its_result_is_recomputed(tmp_path):
    given = context(tmp_path)
    result, raw = catalog.run("static", given)
    assert (result.verdict, result.findings) == (Verdict.PASSED, [])
    assert catalog.recompute(raw, None, None, given.bundle) == result
    assert json.loads(raw)["records"]["checks"] == list(examine.CHECKS)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"lfs_pointer": True}, "lfs-pointer"),
        ({"truncated_bytes": 1000}, "header-invalid"),
        ({"template": "{% for %}"}, "template-fails"),
        ({"context_length": 256}, "context-too-long"),
    ],
)
def test_a_bundle_that_does_not_fit_fails_with_the_reason(tmp_path, options, code):
    given = context(tmp_path, **options)
    result, raw = catalog.run("static", given)
    assert result.verdict is Verdict.FAILED
    assert result.findings[0].code == code
    assert result.findings[0].advice
    assert catalog.recompute(raw, None, None, given.bundle) == result


def test_a_file_that_is_not_there_fails(tmp_path):
    given = context(tmp_path)
    (given.root / "model.gguf").unlink()
    result, _ = catalog.run("static", given)
    assert (result.verdict, result.findings[0].code) == (Verdict.FAILED, "file-missing")


def test_records_in_which_a_check_did_not_run_are_errored(tmp_path):
    given = context(tmp_path)
    _, raw = catalog.run("static", given)
    body = json.loads(raw)
    body["records"]["checks"].remove("weights")
    assert catalog.recompute(canonical_json(body), None, None, given.bundle).verdict is Verdict.ERRORED


@pytest.mark.parametrize(
    "change",
    [{"code": "wish"}, {"severity": "info"}, {"severity": "loud"}, {"message": None, "code": 3}],
)
def test_records_that_nobody_wrote_are_errored(tmp_path, change):
    given = context(tmp_path, template="{% for %}")
    _, raw = catalog.run("static", given)
    body = json.loads(raw)
    body["records"]["flaws"][0] |= change
    assert catalog.recompute(canonical_json(body), None, None, given.bundle).verdict is Verdict.ERRORED


def test_a_finding_of_a_result_has_the_very_values_that_bundle_validate_gives(tmp_path):
    root = micro_sharded(tmp_path / "m")
    edit_json(root / "config.json", lambda told: told.update(num_hidden_layers=7, vocab_size="many"))
    (root / "model-00001-of-00003.safetensors").unlink(missing_ok=True)
    flaws = validate(root).flaws
    assert {type(one.found) for one in flaws} - {str, type(None)}, "some are no texts"
    for one in flaws:
        told = json.loads(json.dumps(as_finding(one).model_dump(mode="json")))
        assert (told["found"], told["expected"]) == (one.as_json()["found"], one.as_json()["expected"])
        assert Finding.model_validate(told) == as_finding(one)


def test_a_value_that_is_too_large_for_a_result_is_told_as_cut_text():
    huge = flaw("lora-no-match", "No.", severity=Severity.WARN, found=["x" * 100] * 1000, expected={"a": 2**60})
    told = as_finding(huge)
    assert isinstance(told.found, str)
    assert told.found.endswith("…")
    assert told.expected == {"a": str(2**60)}
    for wrong in ("", "x" * 5000, ["x" * 20_000], {"a": float("nan")}):
        with pytest.raises(ValidationError):
            Finding(code="x", severity=Severity.WARN, message="No.", found=wrong)


def test_no_kind_of_warning_is_buried_under_many_of_another(tmp_path):
    given = context(tmp_path)
    _, raw = catalog.run("static", given)
    body = json.loads(raw)
    many = [
        flaw(code, f"{code} {place}.", severity=Severity.WARN, found=place, expected=None)
        for code in ("total-size-wrong", "shard-orphan", "constant-weight")
        for place in range(examine.MOST_OF_A_CODE)
    ]
    last = flaw("template-clock", "The template writes the date.", severity=Severity.WARN, found="now", expected=None)
    body["records"]["flaws"] = [one.as_json() for one in (*many, last)]
    result = catalog.recompute(canonical_json(body), None, None, given.bundle)
    assert (result.verdict, len(result.findings)) == (Verdict.PASSED, 500)
    # Each needs somebody who answers for it.
    warned = {one.code for one in result.findings if one.severity is Severity.WARN}
    assert warned == {"total-size-wrong", "shard-orphan", "constant-weight", "template-clock"}
    assert result.findings[-1].code == "template-clock"


def test_numbers_and_texts_that_records_cannot_hold_are_still_told(tmp_path):
    root = micro_sharded(tmp_path / "m")
    edit_json(root / "model.safetensors.index.json", lambda told: told["metadata"].update(total_size=10**30))
    from gates.static.gate import _storable  # the one place that makes findings storable

    assert canonical_json(_storable([one.as_json() for one in validate(root).flaws]))


def test_every_code_is_said_somewhere_and_only_codes_are_said():
    said = set()
    for path in STATIC.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "flaw" and node.args:
                choice = node.args[0]
                names = [choice.body, choice.orelse] if isinstance(choice, ast.IfExp) else [choice]
                said |= {one.value for one in names if isinstance(one, ast.Constant)}
    said |= set(listing.REFUSALS.values()) | {listing.OTHER_REFUSALS} | contents.JUDGED
    assert said == set(CODES)


def test_a_flaw_has_a_severity_of_its_code_and_comes_back_from_json():
    one = flaw("lora-no-match", "No.", severity=Severity.WARN, found={"a": [1]}, expected={"a": []}, file="x")
    assert read_flaw(json.loads(json.dumps(one.as_json()))) == one
    with pytest.raises(ValueError, match="never"):
        flaw("lora-no-match", "No.", severity=Severity.INFO, found=1, expected=0)


def test_a_refusal_of_files_tells_what_was_found_and_what_is_expected(tmp_path):
    root = speak(micro(tmp_path / "m"))
    for name in ("x.tar.gz", "x.exe", "adapter_model.bin", "aux.json"):
        (root / name).write_bytes(b"{}")
    (root / "out.json").symlink_to("/etc/hostname")
    (root / "lost.json").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe.json")
    (root / "model.safetensors").write_bytes((root / "model.safetensors").read_bytes()[:900])
    words = ["--tokenizer", "/etc", "--trust-remote-code"]
    found = validate(root, {"engine": {"name": "vllm", "version": "0.32.0", "arguments": words}})  # which looks at each
    assert codes(found, "block") >= {
        *("archive", "program", "pickle-weights", "name-refused", "link-escapes-root", "dangling-link"),
        *("file-irregular", "header-invalid", "launch-refused", "remote-code"),
    }


def test_a_catalogue_entry_is_two_sentences():
    for name, code in CODES.items():
        for text in (code.says, code.advice):
            assert text.endswith("."), name
            assert "|" not in text


def test_every_rule_has_a_range_and_a_source():
    for engine, told in rules.table("engines")["engines"].items():
        for name, entries in told.items():
            assert entries, (engine, name)
            for entry in entries:
                assert set(entry) == {"versions", "value", "source"}, (engine, name)
                assert entry["source"]
    for entry in rules.table("libraries")["rules"]:
        assert entry["source"]
    for entry in rules.table("implemented")["implemented"]:
        assert set(entry) - {"unverified"} == {"engine", "versions", "model_types", "source"}
        assert entry.get("unverified", "what?")
        assert entry["source"]
        assert entry["model_types"] == sorted(set(entry["model_types"]))


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.32.0", ">=0.8.0", True),
        ("0.7.3", ">=0.8.0", False),
        ("0.33.0rc1", ">=0.8.0", True),
        ("2026.10.11549", ">=2026", True),
        (None, ">=0.8.0", True),
        (None, "<0.8.0", False),
        ("nightly", ">=0.8.0", False),
        ("nightly", "", True),
    ],
)
def test_a_version_lies_in_a_range(version, specifier, expected):
    assert is_within(version, specifier) is expected


@pytest.mark.parametrize(
    ("engine", "version", "model_type", "expected"),
    [
        ("vllm", "0.32.0", "kimi_k2", True),
        ("vllm", "0.9.2", "kimi_k2", False),
        ("vllm", None, "kimi_k2", True),
        ("vllm", "0.10.2", "phi4flash", True),
        ("vllm", "0.32.0", "phi4flash", False),
        ("vllm", None, "phi4flash", False),
        ("vllm", "nightly", "phi3", False),
        ("vllm", "0.23.0", "qwen", True),
        ("vllm", "0.24.0", "qwen", False),
        ("vllm", "0.32.0", "baichuan", False),
        ("vllm", "0.28.0", "mpt", True),
        ("vllm", None, "mpt", False),
        ("sglang", "0.5.9", "orion", True),
        ("sglang", "0.4.0", "deepseek_v3", False),
        ("sglang", "0.4.1", "deepseek_v3", True),
        ("sglang", "0.5.0", "kimi_linear", False),
        ("sglang", "0.5.6", "kimi_linear", True),
        ("trtllm", "0.17", "deepseek_v3", False),
        ("trtllm", "1.0", "deepseek_v3", True),
        ("trtllm", "1.0", "phi3", False),
        ("tgi", "3.3.6", "deepseek_v3", True),
        ("tgi", "2.0.0", "deepseek_v3", False),
        ("tgi", "3.3.6", "kimi_k2", False),
        ("transformers", "5.0.0", "qwen", False),
        ("external", "1", "phi3", False),
        (None, None, "phi4flash", True),
        (None, None, "llama", False),
    ],
)
def test_an_engine_implements_a_family_in_a_range_of_versions(engine, version, model_type, expected):
    assert (model_type in rules.implemented(engine, version)) is expected


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("sm_86", 86),
        ("sm90a", 90),
        ("8.9", 89),
        ("nvidia-a10g", 86),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("nvidia-l40s", 89),
        ("NVIDIA H100 80GB HBM3", 90),
        ("nvidia-t4", 75),
        ("cpu", None),
        ("mi300x", None),
        (None, None),
    ],
)
def test_an_accelerator_is_known_by_its_name(accelerator, expected):
    assert capability(accelerator) == expected
