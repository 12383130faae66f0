"""Which gates must run again: only what the tables state carries over, and never more for a larger change."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import catalog, features
from gates.couplings import COUPLINGS, NO_ROW, NOT_REACHED, UPGRADES
from gates.difference import DOUBTFUL, PARTS, diff
from gates.features import JOINTS, MATRIX_PARTS, TRAITS
from gates.impact import ADVICE, NO_RESULT, SAME, Recorded, again, impact, of_difference, triggers
from schemas.bundle import COMPONENTS, Bundle
from schemas.policy import Policy
from schemas.result import Finding, GateResult, Severity, Verdict
from schemas.runner import Fingerprint
from tests.support.factories import bundle_body, file_entry, policy_body

NOW = datetime(2026, 11, 29, 10, tzinfo=UTC)
BOOTED = {"compatibility", "golden", "structured", "load"}


def bundle(**changes):
    return Bundle.model_validate(bundle_body(**changes))


PLAIN = bundle()
TITLED = bundle(description="The same, with a title.")


def outcomes(found):
    return {one.gate: one.outcome for one in found.gates}


# ---------------------------------------------------------------------------------------------------- the tables


def test_every_gate_of_the_catalogue_has_a_row_and_every_part_a_cell():
    assert [*COUPLINGS] == [*catalog.CATALOG], "a new gate says in gates/couplings.py what carries over"
    for name, row in COUPLINGS.items():
        assert not row.again.keys() & row.carries.keys()
        assert row.again.keys() | row.carries.keys() == {*PARTS}, f"a part has no cell for {name}"
        assert all(why.endswith(".") for why in (*row.again.values(), *row.carries.values()))
        assert row.bound_to


@pytest.mark.parametrize("gate", catalog.CATALOG)
def test_a_gate_runs_again_for_exactly_the_components_that_it_declares_to_depend_on(gate):
    assert {part for part in COUPLINGS[gate].again if part in COMPONENTS} == {*catalog.CATALOG[gate].depends_on}


def test_what_is_served_carries_over_only_where_a_gate_declares_that_it_does_not_read_it():
    assert {
        gate: {*row.carries} & {*COMPONENTS} for gate, row in COUPLINGS.items() if {*row.carries} & {*COMPONENTS}
    } == {"placement": {"tokenizer", "template", "serving"}}
    for row in COUPLINGS.values():
        assert DOUBTFUL in row.again


def test_every_combination_names_features_and_gates_that_there_are_and_says_what_none_sees():
    assert len({joint.name for joint in JOINTS}) == len(JOINTS)
    for joint in JOINTS:
        assert {*joint.features} <= TRAITS.keys()
        assert {*joint.gates} <= catalog.CATALOG.keys()
        assert joint.gates or joint.unseen
    assert {name for joint in JOINTS for name in joint.features} == TRAITS.keys()
    assert {part for trait in TRAITS.values() for part in trait.parts} | MATRIX_PARTS <= {*PARTS}


@pytest.mark.parametrize("joint", JOINTS, ids=lambda joint: joint.name)
def test_a_gate_that_sees_a_combination_runs_again_whenever_the_combination_is_asked_for(joint):
    for part in triggers(joint):
        assert all(again(gate, [part]) for gate in joint.gates)


def test_what_is_not_in_the_tables_carries_nothing(monkeypatch):
    monkeypatch.setitem(catalog.CATALOG, "new", catalog.CATALOG["static"])
    for other in (TITLED, PLAIN):
        new = impact(PLAIN, other).gates[-1]
        assert (new.gate, new.outcome, new.reasons[0].why) == ("new", "again", NO_ROW)
    assert again("static", ["new part"])
    assert again("new", ["description"])


def test_bundles_that_differ_in_no_part_carry_nothing():
    unplaced = diff(PLAIN, TITLED).model_copy(update={"changed": []})
    found = of_difference(unplaced, TITLED)
    assert {one.outcome for one in found.gates} == {"again"}
    assert found.gates[0].reasons[0].why == NOT_REACHED
    assert found.joint


# ------------------------------------------------------------------------------------------------- what carries over


def test_nothing_runs_again_for_one_and_the_same_bundle():
    found = impact(PLAIN, PLAIN)
    assert {*outcomes(found).values()} == {"would_carry"}
    assert {reason.why for one in found.gates for reason in one.reasons} == {SAME}
    assert found.is_same
    assert found.joint == []
    assert found.advice == ADVICE


@pytest.mark.parametrize("change", [{"description": "A title."}, {"labels": {"team": "search"}}, {"name": "other"}])
def test_what_people_call_a_bundle_leaves_what_engines_showed(change):
    found = outcomes(impact(PLAIN, bundle(**change)))
    assert {gate for gate, outcome in found.items() if outcome == "would_carry"} == BOOTED | {"static", "placement"}
    assert {gate for gate, outcome in found.items() if outcome == "again"} == {"integrity", "rollback"}


@pytest.mark.parametrize(("path", "role"), [("README.md", "documentation"), ("LICENSE", "licence")])
def test_a_text_for_people_leaves_what_engines_showed_and_is_checked_as_a_file(path, role):
    files = sorted([*bundle_body()["files"], file_entry(path, b"text", role)], key=lambda one: one["path"])
    found = outcomes(impact(PLAIN, bundle(files=files)))
    assert {gate for gate, outcome in found.items() if outcome == "would_carry"} == BOOTED | {"placement"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_change_of_any_component_asks_for_every_gate_that_depends_on_it_again(component):
    assert {gate for gate in catalog.CATALOG if again(gate, [component])} == {
        name for name, gate in catalog.CATALOG.items() if component in gate.depends_on
    }
    assert all(again(gate, [component]) for gate in BOOTED)
    assert all(again(gate, [DOUBTFUL]) for gate in catalog.CATALOG)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*catalog.CATALOG, "unknown"]), st.sets(st.sampled_from([*PARTS, "unknown"]), min_size=1), st.data()
)
def test_a_larger_change_never_asks_for_less(gate, parts, data):
    fewer = data.draw(st.sets(st.sampled_from(sorted(parts))))
    assert again(gate, sorted(parts)) or not again(gate, sorted(fewer))


# ----------------------------------------------------------------------------------------------------- evidence of A


def recorded(gate="compatibility", verdict=Verdict.PASSED, *, age=0, rule=None, findings=(), revoked=None):
    policy = Policy.model_validate(policy_body())
    rules = {one.gate: one for one in policy.gates}
    result = GateResult(
        gate=gate,
        definition=catalog.definition(gate, rule or rules.get(gate, rules["integrity"])),
        verdict=verdict,
        summary="said",
        measurements=[],
        findings=list(findings),
        duration_ms=1,
        source="run",
    )
    return Recorded("sha256:" + "e" * 64, result, NOW - timedelta(seconds=age), "runner-1", revoked)


def of_compatibility(other=TITLED, **told):
    policy = Policy.model_validate(policy_body())
    held = {"compatibility": recorded(**told)}
    found = impact(PLAIN, other, policy=policy, evidence=held, now=NOW)
    assert found.policy == policy.digest
    assert [one.gate for one in found.gates] == ["integrity", "compatibility"]
    return found.gates[1]


def test_a_passed_result_by_the_same_rule_carries_over_and_is_cited():
    found = of_compatibility()
    assert found.outcome == "carries"
    assert (found.held.entry, found.held.runner, found.held.refused) == ("sha256:" + "e" * 64, "runner-1", None)
    assert found.bound_to == COUPLINGS["compatibility"].bound_to
    assert of_compatibility(age=86_400).outcome == "carries"


WARNING = Finding(code="slow", severity=Severity.WARN, message="slow", pointer="p", found="1", expected="2", advice="x")
OTHER_RULE = Policy.model_validate(
    policy_body(gates=[{"gate": "integrity"}, {"gate": "compatibility", "boot_seconds": "61", "answer_seconds": "10"}])
).gates[1]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        *[({"verdict": verdict}, f"is {verdict}") for verdict in Verdict if verdict is not Verdict.PASSED],
        ({"age": 86_401}, "too old"),
        ({"rule": OTHER_RULE}, "another rule"),
        ({"revoked": "the clock was wrong"}, "revoked: the clock was wrong"),
        ({"findings": [WARNING]}, "with warnings"),
    ],
)
def test_a_result_that_counts_no_more_carries_nothing(told, why):
    found = of_compatibility(**told)
    assert found.outcome == "again"
    assert why in found.reasons[-1].why
    assert found.held.refused == found.reasons[-1].why
    assert found.reasons[-1].part == "evidence"


def test_a_gate_without_a_result_runs_again_even_for_the_same_bundle():
    for other in (PLAIN, TITLED):
        found = {one.gate: one for one in impact(PLAIN, other, evidence={}, now=NOW).gates}
        assert {one.outcome for one in found.values()} == {"again"}
        assert found["golden"].reasons[-1].why == NO_RESULT
        assert found["golden"].held is None


def test_a_result_does_not_carry_over_a_change_that_it_depends_on():
    found = of_compatibility(other=bundle(runtime={"context_tokens": 1024, "max_sequences": 4}))
    assert found.outcome == "again"
    assert [reason.part for reason in found.reasons if reason.is_against] == ["runtime"]
    assert found.held.refused is None, "the result is still cited"


def test_the_reasons_that_decide_are_told_once_and_missing_evidence_only_where_nothing_else_decides():
    other = bundle(description="A title.", runtime={"context_tokens": 1024, "max_sequences": 4})
    found = {one.gate: one.deciding() for one in impact(PLAIN, other, evidence={}, now=NOW).gates}
    assert [parts for parts, _ in found["integrity"]] == [["runtime", "description"]]
    assert [parts for parts, _ in found["golden"]] == [["runtime"]]
    assert found["placement"] == [(["runtime"], COUPLINGS["placement"].again["runtime"])]
    found = {one.gate: one.deciding() for one in impact(PLAIN, TITLED, evidence={}, now=NOW).gates}
    assert found["golden"] == [(["evidence"], NO_RESULT)]
    found = {one.gate: one.deciding() for one in impact(PLAIN, TITLED).gates}
    assert found["golden"] == [(["description"], COUPLINGS["golden"].carries["description"])]


def test_without_a_clock_no_result_of_a_policy_counts():
    policy = Policy.model_validate(policy_body())
    found = impact(PLAIN, TITLED, policy=policy, evidence={"compatibility": recorded()})
    assert {one.outcome for one in found.gates} == {"again"}


# ---------------------------------------------------------------------------------------------------- combinations

DRAFT = {"draft": {"method": "ngram", "tokens": 4}}
LORA = {
    "files": [file_entry("model.gguf", b"w", "weights"), file_entry("tone/adapter_model.safetensors", b"a", "adapter")],
    "adapters": [{"name": "tone", "files": ["tone/adapter_model.safetensors"], "rank": 8, "target_modules": ["q"]}],
}
SERVING = bundle_body()["serving"]
TOPOLOGY = bundle_body()["topology"]


def engine(*arguments, **changes):
    return {"engine": bundle_body()["engine"] | {"name": "vllm", "arguments": [*arguments]} | changes}


def runtime(**changes):
    return {"runtime": bundle_body()["runtime"] | changes}


GPU = {"hardware": {"accelerator": "nvidia-h100", "count": 1}}
ROWS = {
    "quantized weights + attention or MoE backend": (
        {"quantization": {"method": "awq", "bits": 4}},
        {"quantization": {"method": "none"}},
        engine(attention_backend="flashinfer"),
    ),
    "quantized KV + maximum context": (
        {"quantization": {"method": "none", "kv_cache": "fp8"}},
        {"quantization": {"method": "none", "kv_cache": "auto"}},
        runtime(context_tokens=1024),
    ),
    "speculative decoding + structured output": (
        DRAFT | {"serving": SERVING | {"features": ["chat", "json_schema"]}},
        DRAFT,
        {"draft": {"method": "ngram", "tokens": 5}},
    ),
    "LoRA + prefix cache": (
        LORA | runtime(prefix_caching=True),
        LORA | runtime(prefix_caching=False),
        runtime(max_sequences=8, prefix_caching=True),
    ),
    "prefix cache + multiple tenants": (
        runtime(prefix_caching=True),
        runtime(prefix_caching=False),
        runtime(prefix_caching=True, max_sequences=8),
    ),
    "CUDA Graphs + dynamic or multimodal shapes": (
        GPU,
        {},
        {"tokenizer": {"origin": "weights", "media_limits": {"image": 4}}},
    ),
    "DP + cache-aware routing": (
        {"topology": TOPOLOGY | {"data_parallel": 2}},
        {},
        {"topology": TOPOLOGY | {"data_parallel": 4}},
    ),
    "TP/PP/EP + disaggregation": (
        {"topology": TOPOLOGY | {"tensor_parallel": 2}} | engine("--kv-transfer-config", "{}"),
        {"topology": TOPOLOGY | {"tensor_parallel": 2}} | engine(),
        {"topology": TOPOLOGY | {"tensor_parallel": 4}},
    ),
    "chunked prefill + priority scheduling": (
        engine("--scheduling-policy", "priority"),
        engine("--scheduling-policy", "priority", "--no-enable-chunked-prefill"),
        runtime(max_batch_tokens=99),
    ),
    "streaming + proxy + billing": (
        {},
        {"serving": SERVING | {"features": ["chat"]}},
        {"serving": SERVING | {"cancellation": "none"}},
    ),
}
"""Combination → what has it in use, what has not, and a change that asks for it again."""


@pytest.mark.parametrize("name", ROWS)
def test_a_combination_is_asked_for_when_it_is_in_use_and_one_side_of_it_changes(name):
    used, unused, change = (dict(one) for one in ROWS[name])
    before = bundle(**used)
    merged = used | change
    if "engine" in used and "engine" in change:
        merged["engine"] = used["engine"] | change["engine"]
    asked = {one.name: one for one in impact(before, bundle(**merged)).joint}
    assert name in asked
    assert asked[name].because
    assert asked[name].what
    # A title changes neither side, and what is not in use needs no check.
    assert impact(before, bundle(**used, description="A title.")).joint == []
    off = impact(bundle(**unused), bundle(**(unused | {"model": {"format": "gguf", "architecture": "qwen3"}}))).joint
    assert name not in {one.name for one in off}


def test_the_first_ten_combinations_are_the_known_ones():
    assert [joint.name for joint in JOINTS[: len(ROWS)]] == [*ROWS]


FIVE = ("quantized KV", "prefix cache", "speculative decoding", "LoRA", "TP/PP/EP")


def test_the_five_features_that_share_cache_and_layout_are_checked_pair_by_pair():
    pairs = {frozenset(joint.features) for joint in JOINTS}
    assert all(frozenset({one, other}) in pairs for one in FIVE for other in FIVE if one != other)
    everything = (
        LORA
        | DRAFT
        | runtime(prefix_caching=True)
        | {"quantization": {"method": "none", "kv_cache": "fp8"}, "topology": TOPOLOGY | {"tensor_parallel": 2}}
    )
    before = bundle(**everything)
    asked = {
        frozenset(one.features)
        for one in impact(before, bundle(**everything, model={"format": "gguf", "architecture": "qwen3"})).joint
    }
    assert {frozenset({one, other}) for one in FIVE for other in FIVE if one != other} <= asked


@pytest.mark.parametrize("part", sorted({*MATRIX_PARTS, DOUBTFUL}))
def test_an_upgrade_of_engine_hardware_model_adapter_or_quantization_asks_for_every_combination_again(part):
    assert all(part in triggers(joint) for joint in JOINTS)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (engine("--config", "engine.yaml"), "LoRA"),
        (engine("--extra_llm_api_options", "more.yaml"), "quantized KV"),
        ({"engine": {"name": "external", "version": "unknown", "arguments": []}}, "speculative decoding"),
        ({"engine": bundle_body()["engine"] | {"variables": {"LLAMA_ARG_LORA": "x.gguf"}}}, "LoRA"),
        ({}, "prefix cache"),
    ],
)
def test_what_a_bundle_does_not_tell_counts_as_in_use_and_is_said_so(changes, name):
    assert TRAITS[name].used(bundle(**changes)) is None
    asked = impact(bundle(**changes), bundle(**(changes | {"hardware": {"accelerator": "cpu", "count": 1}}))).joint
    assert any(name in one.unstated for one in asked)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--kv-cache-dtype", "fp8"), "quantized KV"),
        (("-ctk", "q8_0"), "quantized KV"),
        (("--speculative-config", "{}"), "speculative decoding"),
        (("--enable-lora",), "LoRA"),
        (("--tensor-parallel-size=2",), "TP/PP/EP"),
        (("--data-parallel-size", "2"), "DP"),
        (("--quantization", "awq"), "quantized weights"),
        (("--enable-prefix-caching",), "prefix cache"),
        (("--disaggregation-mode", "prefill"), "disaggregation"),
    ],
)
def test_a_launch_argument_turns_a_feature_on_as_the_document_does(arguments, name):
    assert TRAITS[name].used(bundle(**engine(*arguments))) is True
    assert TRAITS[name].used(bundle(**engine())) is not True


def test_a_launch_argument_turns_caches_and_graphs_off():
    assert TRAITS["prefix cache"].used(bundle(**engine("--disable-radix-cache"))) is False
    assert TRAITS["CUDA Graphs"].used(bundle(**GPU, **engine("--enforce-eager"))) is False
    assert features.TRAITS["CUDA Graphs"].used(bundle(**GPU)) is None


# ------------------------------------------------------------------------------------------------- coupled changes


UPGRADED = {
    "driver": {"hardware": {"accelerator": "nvidia-h100", "count": 1, "driver": ">=560"}},
    "CUDA": {"hardware": {"accelerator": "nvidia-h100", "count": 1, "cuda": ">=12.8"}},
    "engine": {"engine": bundle_body()["engine"] | {"version": "next"}},
    "kernel": {"engine": bundle_body()["engine"] | {"attention_backend": "flashinfer"}},
    "model": {"files": [file_entry("model.gguf", b"others", "weights")]},
    "template": {"template": {"origin": "none"}},
    "quantization": {"quantization": {"method": "q4_k_m", "bits": 4}},
    "topology": {"topology": TOPOLOGY | {"tensor_parallel": 2}},
    "routing": None,
}


@pytest.mark.parametrize("name", UPGRADED)
def test_every_coupled_change_is_revalidated_or_is_said_to_be_outside(name):
    (upgrade,) = (one for one in UPGRADES if one.name == name)
    if UPGRADED[name] is not None:
        found = impact(PLAIN, bundle(**UPGRADED[name]))
        assert {one.gate for one in found.gates if one.outcome == "again"} >= catalog.CATALOG.keys() - {"placement"}
        assert {change.part for change in diff(PLAIN, bundle(**UPGRADED[name])).changed} <= {*upgrade.parts}
    told = {one.change: one.gates for one in impact(PLAIN, PLAIN).outside}
    assert (name in told) == bool(upgrade.fingerprint or not upgrade.parts)
    if name in told:
        assert told[name]
        assert {*upgrade.gates} <= catalog.CATALOG.keys()
    assert {*upgrade.parts} <= COMPONENTS.keys()
    assert {*upgrade.fingerprint} <= Fingerprint.model_fields.keys()


def test_nothing_but_the_coupled_changes_is_listed():
    assert [one.name for one in UPGRADES] == [*UPGRADED]
