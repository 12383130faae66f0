from registry import documents, targets
from registry.settings import Gateway
from schemas.api import RecordCreate, TargetCreate
from tests.support import factories, structured
from tests.support.runners import QUICK_GATES, result, until

TARGET = "chain@test"
PROMISES_JSON = {
    "served_name": "chain",
    "usage": "all_tokens",
    "cancellation": "on_disconnect",
    **structured.JSON_FEATURES,
}


def prepared(bench, tmp_path):
    """A target, a golden suite, and a policy that compares with it."""
    suite = factories.registered_golden(bench.service, bench.api.actor())
    golden = {"gate": "golden", "suite": suite.digest, "margin_nat": "0.1", "min_prompts": 2}
    policy = bench.policy([*QUICK_GATES, golden], "with-golden")
    gateways = {"local": Gateway(directory=tmp_path / "gateway", url="http://127.0.0.1:1")}
    bench.service.settings.gateways.update(gateways)
    with bench.service.database.transaction() as session:
        body = TargetCreate(name=TARGET, runner_class="cpu", gateway="local")
        targets.create(session, bench.service, bench.api.actor("manager"), body)
    return suite, policy


def recorded(bench, suite, bundle):
    body = RecordCreate(suite=suite.digest, bundle=bundle.digest, target=TARGET, reason="the first yardstick")
    return bench.client("manager").runs.record(body).id


def test_a_recorded_reference_passes_its_own_bundle_and_fails_another_template(bench, tmp_path):
    suite, policy = prepared(bench, tmp_path)
    good = bench.bundle()
    bench.start()
    record = recorded(bench, suite, good)
    done = bench.done(record)
    assert done.reference is not None, done
    assert bench.client().targets.get(TARGET).references == {suite.digest: done.reference}
    assert [entry.kind for entry in bench.entries(record) if entry.kind != "replica_changed"] == [
        "run_asked",
        "staged",
        "engine_booted",
        "run_ended",
    ]
    same = bench.evaluate(good, policy, target=TARGET)
    assert bench.done(same).outcome == "passed"
    other = bench.bundle(
        "other",
        template="{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    run = bench.evaluate(other, policy, target=TARGET)
    done = bench.done(run)
    assert done.outcome == "failed"
    assert result(done, "golden")["verdict"] == "failed"
    assert result(done, "integrity")["verdict"] == "passed"


def test_one_boot_serves_all_four_gates(bench, tmp_path):
    golden_suite, _ = prepared(bench, tmp_path)
    load_suite = factories.registered_load(bench.service, bench.api.actor(), requests=60)
    golden = {"gate": "golden", "suite": golden_suite.digest, "margin_nat": "0.1", "min_prompts": 2}
    load = {
        "gate": "load",
        "suite": load_suite.digest,
        "percentile": "0.9",
        "confidence": "0.95",
        "requests": 60,
        "ttft_ms": 8000,
        "tpot_ms": 4000,
        "e2e_ms": 9000,
        "attainment_min": "0.9",
        "error_max": "0.1",
        "send_lag_ms": 800,
    }
    policy = bench.policy([*QUICK_GATES, golden, load], "everything")
    bundle = bench.bundle()
    agent = bench.start()
    bench.done(recorded(bench, golden_suite, bundle))
    run = bench.evaluate(bundle, policy, target=TARGET)
    agent.ring()
    done = bench.done(run)
    assert [(one["gate"], one["verdict"]) for one in done.results] == [
        (gate, "passed") for gate in ("compatibility", "golden", "load", "integrity")
    ], done.results
    assert bench.states(run).count("loading") == 1


def test_a_bundle_that_does_not_boot_records_nothing(bench, tmp_path):
    suite, _ = prepared(bench, tmp_path)
    bench.start()
    record = recorded(bench, suite, bench.bundle("bad", truncated_bytes=900_000))
    row = until(lambda: row if (row := bench.row(record)).problem else None, what="the problem")
    assert row.problem.startswith("engine-failed")
    assert bench.client().targets.get(TARGET).references == {}


def test_where_compatibility_is_not_asked_a_failed_boot_leaves_the_gate_errored(bench, tmp_path):
    suite, policy = prepared(bench, tmp_path)
    bench.start()
    assert bench.done(recorded(bench, suite, bench.bundle())).reference
    bad = bench.bundle("bad", truncated_bytes=900_000)
    done = bench.done(bench.evaluate(bad, policy, target=TARGET, gates=["golden"]))
    assert result(done, "golden")["verdict"] == "errored"
    assert done.outcome == "undecided"


def test_a_structured_gate_runs_in_an_evaluation(bench):
    suite = structured.suite()
    with bench.service.database.transaction() as session:
        documents.register(session, bench.service, bench.api.actor(), "suite", suite.canonical())
    policy = bench.policy([*QUICK_GATES, structured.rule_body(suite.digest)], "structured")
    run = bench.evaluate(bench.bundle("json", serving=PROMISES_JSON), policy)
    plain = bench.evaluate(bench.bundle("plain"), policy)
    bench.start()
    done = result(bench.done(run), "structured")
    assert done["verdict"] == "passed", done["summary"]
    failed = result(bench.done(plain), "structured")
    assert (failed["verdict"], failed["findings"][0]["code"]) == ("failed", "json-schema-not-declared")
