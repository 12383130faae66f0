"""A load run on a machine that other processes used as well."""

import pytest

from gates import catalog, load
from gates.gate import JudgeInput
from gates.load_judgement import judge
from schemas.result import Severity, Verdict
from tests.support import chain
from tests.support.load_run import break_row, good_records, load_rule, load_suite

SUITE = load_suite()
RULE = load_rule(SUITE)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = chain.write_bundle_directory(tmp_path_factory.mktemp("chain"))
    return chain.describe(root, environment="sha256:" + "0" * 64)


@pytest.fixture
def verdict(bundle):
    def give(records):
        return judge(JudgeInput(RULE, records, bundle, SUITE))

    return give


def measured(judged, name):
    return next(each for each in judged.measurements if each.name == name)


def codes(judged):
    return [each.code for each in judged.findings if each.severity is not Severity.INFO]


def busy_machine(records, foreign, **changes):
    """Say that other processes used a share of the machine's two processors for ten seconds."""
    own, engine = 500_000, 6_000_000
    records["harness"]["machine"] = {
        "cores": 2,
        "wall_us": 10_000_000,
        "busy_us": own + engine + round(foreign * 20_000_000),
        "engine_us": engine,
        "own_us": own,
    } | changes
    return records


def slow_records():
    return good_records(SUITE, ttft_ms=700.0)


def test_a_slow_candidate_on_a_machine_that_others_kept_busy_is_not_blamed(verdict):
    found = verdict(busy_machine(slow_records(), 0.21))
    assert found.verdict is Verdict.ERRORED
    assert found.summary.startswith("Other processes used 21% of the machine's 2 processors meanwhile; 20% is allowed")
    assert "p90 TTFT is" in found.summary
    assert codes(found) == ["machine-busy"]
    assert "ttft-over-bound" in {each.code for each in found.findings}
    assert measured(found, "foreign_cpu").value == pytest.approx(0.21)
    assert measured(found, "foreign_cpu").limit == 0.2


@pytest.mark.parametrize(
    ("foreign", "changes"),
    [
        (0.2, {}),
        (0.0, {}),
        (-0.1, {}),
        (0.9, {"engine_us": None}),
        # What the engine itself used is nobody else's.
        (0.9, {"engine_us": 20_000_000}),
    ],
)
def test_a_slow_candidate_that_nobody_kept_from_the_processors_fails(verdict, foreign, changes):
    found = verdict(busy_machine(slow_records(), foreign, **changes))
    assert found.verdict is Verdict.FAILED
    assert "ttft-over-bound" in codes(found)


def test_a_slow_candidate_fails_by_records_of_a_version_that_did_not_watch_the_machine(verdict):
    found = verdict(slow_records())
    assert found.verdict is Verdict.FAILED
    assert not [each for each in found.measurements if each.name == "foreign_cpu"]


def test_a_candidate_that_passes_on_a_busy_machine_has_passed(verdict):
    found = verdict(busy_machine(good_records(SUITE), 0.9))
    assert found.verdict is Verdict.PASSED
    assert measured(found, "foreign_cpu").value == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [("http_5xx", Verdict.FAILED), ("truncated", Verdict.FAILED), ("timeout", Verdict.ERRORED)],
)
def test_no_other_work_excuses_answers_that_are_errors_and_it_may_excuse_those_that_took_too_long(
    verdict, outcome, expected
):
    records = good_records(SUITE)
    for row in records["requests"][:20]:
        break_row(row, outcome)
    assert verdict(busy_machine(records, 0.9)).verdict is expected
    assert verdict(records | {"harness": records["harness"] | {"machine": None}}).verdict is Verdict.FAILED


def test_no_other_work_excuses_an_engine_that_died(verdict):
    records = busy_machine(slow_records(), 0.9)
    records["engine_pids"] = [7, None]
    assert verdict(records).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    "changes", [{"cores": 0}, {"wall_us": 0}, {"busy_us": -1}, {"own_us": None}, {"engine_us": "1"}, {"cores": 1.5}]
)
def test_a_record_of_the_machine_that_cannot_be_makes_the_run_errored(bundle, changes):
    given = JudgeInput(RULE, busy_machine(good_records(SUITE), 0.1, **changes), bundle, SUITE)
    assert catalog._judge(load.GATE, given, None).verdict is Verdict.ERRORED
