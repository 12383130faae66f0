import itertools
from typing import ClassVar

import pytest

from gates import arrivals, policy, stats
from gates.policy import Outcome, decide, plan_problems
from schemas.policy import Policy
from schemas.result import Verdict
from schemas.suite import Arrival, GoldenSuite
from tests.support import structured

PROMPTS = [{"id": "one", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 8}]


def load_suite(**changes):
    spec = {
        "name": "chat",
        "prompts": PROMPTS,
        "rate_per_second": "10",
        "requests": 64,
        "warmup_requests": 4,
        "distribution": "gamma",
        "shape": "1",
        "seed": 1,
        "request_seconds": "10",
    } | changes
    return arrivals.make_suite(arrivals.LoadSpec.model_validate(spec))


GOLDEN = GoldenSuite.model_validate(
    {"schema": "sluicegate.dev/suite/golden/v1", "name": "g", "prompts": PROMPTS, "top_k": 5, "repeats": 2}
)
LOAD = load_suite()
SUITES = {GOLDEN.digest: GOLDEN, LOAD.digest: LOAD}

LOAD_RULE = {
    "gate": "load",
    "suite": LOAD.digest,
    "percentile": "0.9",
    "confidence": "0.99",
    "requests": 64,
    "ttft_ms": 500,
    "tpot_ms": 100,
    "e2e_ms": 2000,
    "attainment_min": "0.95",
    "error_max": "0.05",
    "send_lag_ms": 20,
}
GOLDEN_RULE = {"gate": "golden", "suite": GOLDEN.digest, "margin_nat": "0.1", "min_prompts": 1}
CANARY = {
    "steps": [
        {"weight_bp": weight, "hold_seconds": "2", "min_requests": 29, "max_seconds": "60"} for weight in (1000, 10_000)
    ],
    "stop_conditions": [
        {"metric": "error_ratio", "max_ratio": "0.1"},
        {"metric": "ttft", "percentile": "0.9", "max_ms": 500},
    ],
    "soak_seconds": "10",
    "dead_man_seconds": "60",
    "drain_seconds": "30",
}


def make(*, load=None, golden=None, canary=None):
    return Policy.model_validate(
        {
            "schema": "sluicegate.dev/policy/v1",
            "name": "p",
            "description": "For tests.",
            "gates": [
                {"gate": "integrity"},
                {"gate": "compatibility", "boot_seconds": "30", "answer_seconds": "5"},
                GOLDEN_RULE | (golden or {}),
                LOAD_RULE | (load or {}),
            ],
            "approval": {"required": 0},
            "canary": CANARY | (canary or {}),
            "evidence_seconds": "86400",
        }
    )


def make_drill(suite, **rule):
    """Return a policy that ends with a rollback drill, and what is registered."""
    body = make().model_dump(mode="json", by_alias=True, exclude_none=True)
    body["gates"].append({"gate": "rollback", "suite": suite.digest} | rule)
    return Policy.model_validate(body), SUITES | {suite.digest: suite}


# ------------------------------------------------------------------------------------------------ decide


class TestDecide:
    GATES: ClassVar = ("integrity", "load")

    @pytest.mark.parametrize("pair", list(itertools.product([None, *Verdict], repeat=2)))
    def test_every_pair_of_verdicts_passes_only_when_both_passed(self, pair):
        verdicts = {gate: verdict for gate, verdict in zip(self.GATES, pair, strict=True) if verdict is not None}
        outcome = decide(self.GATES, verdicts).outcome
        if Verdict.FAILED in pair:
            assert outcome is Outcome.FAILED
        elif pair == (Verdict.PASSED, Verdict.PASSED):
            assert outcome is Outcome.PASSED
        else:
            assert outcome is Outcome.UNDECIDED

    def test_no_required_gate_fails(self):
        found = decide((), {"integrity": Verdict.PASSED})
        assert found.outcome is Outcome.FAILED
        assert found.reasons == ("the policy requires no gate",)

    def test_a_run_that_ended_before_any_measurement_is_undecided(self):
        found = decide(self.GATES, {})
        assert found.outcome is Outcome.UNDECIDED
        assert found.reasons == ("integrity has not run", "load has not run")

    def test_a_verdict_under_another_name_does_not_count(self):
        found = decide(self.GATES, {"integrity": Verdict.PASSED, "Load": Verdict.PASSED, "load2": Verdict.PASSED})
        assert found.outcome is Outcome.UNDECIDED
        assert found.reasons == ("load has not run",)

    def test_a_gate_that_is_not_required_neither_helps_nor_harms(self):
        verdicts = dict.fromkeys(self.GATES, Verdict.PASSED)
        assert decide(self.GATES, verdicts | {"quality": Verdict.FAILED}).outcome is Outcome.PASSED

    @pytest.mark.parametrize("verdict", [Verdict.ERRORED, Verdict.INCONCLUSIVE, Verdict.ABORTED])
    def test_what_could_not_be_found_out_holds_and_says_why(self, verdict):
        found = decide(self.GATES, {"integrity": Verdict.PASSED, "load": verdict})
        assert found == policy.Decision(Outcome.UNDECIDED, (f"load {verdict}",))

    def test_a_failure_weighs_more_than_what_is_open_and_names_every_failed_gate(self):
        found = decide(
            ("integrity", "golden", "load"),
            {"integrity": Verdict.FAILED, "golden": Verdict.ERRORED, "load": Verdict.FAILED},
        )
        assert found == policy.Decision(Outcome.FAILED, ("integrity failed", "load failed"))


# --------------------------------------------------------------------------------------------- plan_problems


def test_a_policy_whose_samples_can_decide_has_no_problem():
    assert plan_problems(make(), SUITES) == []


@pytest.mark.parametrize(
    ("load", "start"),
    [
        ({"percentile": "0.99"}, "/gates/3/requests: 64 requests cannot pass p99"),
        ({"percentile": "0.4"}, "/gates/3/percentile"),
        ({"percentile": "1"}, "/gates/3/percentile"),
        ({"percentile": "0"}, "/gates/3/percentile"),
        ({"confidence": "1"}, "/gates/3/confidence"),
        ({"confidence": "0.5"}, "/gates/3/confidence"),
        ({"confidence": "0"}, "/gates/3/confidence"),
        ({"attainment_min": "0.98"}, "/gates/3/requests: 64 requests cannot prove attainment_min 0.98"),
        ({"attainment_min": "1"}, "/gates/3/attainment_min: 1 cannot be proved"),
        ({"attainment_min": "0"}, "/gates/3/attainment_min: 0 allows everything"),
        ({"error_max": "0.01"}, "/gates/3/requests: 64 requests cannot prove error_max 0.01"),
        ({"error_max": "0"}, "/gates/3/error_max: 0 cannot be proved"),
        ({"error_max": "1"}, "/gates/3/error_max: 1 allows everything"),
        ({"requests": 63}, "/gates/3/requests: 63 requests are required, and the suite plans 64"),
        ({"requests": 65}, "/gates/3/requests: 65 requests are required, and the suite plans 64"),
        ({"ttft_ms": 2001}, "/gates/3/ttft_ms"),
        ({"e2e_ms": 10_001}, "/gates/3/e2e_ms: the suite gives up after 10 s"),
        ({"send_lag_ms": 51}, "/gates/3/send_lag_ms: 51 ms would hide in a bound of 500 ms: at most 50"),
        ({"suite": GOLDEN.digest}, f"/gates/3/suite: {GOLDEN.digest} is no load suite"),
        ({"suite": "sha256:" + "0" * 64}, "/gates/3/suite: no suite sha256:000"),
    ],
)
def test_a_load_rule_that_could_never_decide_is_refused_and_the_field_named(load, start):
    problems = plan_problems(make(load=load), SUITES)
    assert len(problems) == 1
    assert problems[0].startswith(start)


@pytest.mark.parametrize(
    ("golden", "start"),
    [
        ({"min_prompts": 2}, "/gates/2/min_prompts: 2 prompts are required, and the suite has 1"),
        ({"suite": LOAD.digest}, f"/gates/2/suite: {LOAD.digest} is no golden suite"),
        ({"suite": "sha256:" + "0" * 64}, "/gates/2/suite: no suite sha256:000"),
    ],
)
def test_a_golden_rule_that_could_never_decide_is_refused(golden, start):
    problems = plan_problems(make(golden=golden), SUITES)
    assert len(problems) == 1
    assert problems[0].startswith(start)


def test_a_golden_suite_that_is_recorded_once_is_refused_since_its_noise_stays_unknown():
    once = GOLDEN.model_copy(update={"repeats": 1})
    (problem,) = plan_problems(make(golden={"suite": once.digest}), SUITES | {once.digest: once})
    assert problem.startswith("/gates/2/suite: its reference is recorded once only")
    assert problem.endswith("repeats must be at least 2")
    more = GOLDEN.model_copy(update={"prompts": [*GOLDEN.prompts, GOLDEN.prompts[0].model_copy(update={"id": "two"})]})
    assert plan_problems(make(golden={"suite": more.digest}), SUITES | {more.digest: more}) == []
    often = GOLDEN.model_copy(update={"repeats": 3})
    assert plan_problems(make(golden={"suite": often.digest}), SUITES | {often.digest: often}) == []


@pytest.mark.parametrize(
    ("conditions", "start"),
    [
        ([{"metric": "error_ratio", "max_ratio": "0.01"}], "/canary/steps/0/min_requests: 29 requests cannot prove"),
        ([{"metric": "error_ratio", "max_ratio": "0"}], "/canary/stop_conditions/0/max_ratio: a limit of nothing"),
        ([{"metric": "error_ratio", "max_ratio": "1"}], "/canary/stop_conditions/0/max_ratio: a limit that allows"),
        (
            [*CANARY["stop_conditions"], {"metric": "ttft", "percentile": "1", "max_ms": 9}],
            "/canary/stop_conditions/2/percentile: a limit of nothing",
        ),
        (
            [*CANARY["stop_conditions"], {"metric": "ttft", "percentile": "0", "max_ms": 9}],
            "/canary/stop_conditions/2/percentile: a limit that allows",
        ),
        (
            [*CANARY["stop_conditions"], {"metric": "ttft", "percentile": "0.99", "max_ms": 9}],
            "/canary/steps/0/min_requests: 29 requests cannot prove",
        ),
    ],
)
def test_a_canary_that_could_never_decide_is_refused(conditions, start):
    assert plan_problems(make(canary={"stop_conditions": conditions}), SUITES)[0].startswith(start)


def test_the_canary_floor_is_the_least_that_a_faultless_step_needs():
    steps = [CANARY["steps"][0] | {"min_requests": 28}, CANARY["steps"][1]]
    problems = plan_problems(make(canary={"steps": steps}), SUITES)
    assert problems == [
        "/canary/steps/0/min_requests: 28 requests cannot prove the stop conditions, even if all are good: at least 29"
    ]


@pytest.mark.parametrize(
    "load",
    [
        {"e2e_ms": 10_000},  # as long as the suite waits
        {"percentile": "0.5"},
        {"attainment_min": "0.954"},  # 64 good ones prove 0.95426
        {"error_max": "0.046"},
        {"ttft_ms": 2000},
    ],
)
def test_a_load_rule_at_its_very_bounds_can_decide(load):
    assert plan_problems(make(load=load), SUITES) == []


def test_answers_of_two_tokens_have_a_time_per_token():
    two = load_suite(prompts=[PROMPTS[0] | {"max_tokens": 2}])
    assert plan_problems(make(load={"suite": two.digest}), SUITES | {two.digest: two}) == []


def test_a_step_may_ask_for_more_requests_than_it_needs():
    steps = [step | {"min_requests": 30} for step in CANARY["steps"]]
    assert plan_problems(make(canary={"steps": steps}), SUITES) == []


def test_the_send_lag_that_is_allowed_is_a_whole_number_of_milliseconds():
    problem = "/gates/3/send_lag_ms: 51 ms would hide in a bound of 509 ms: at most 50"
    assert plan_problems(make(load={"ttft_ms": 509, "send_lag_ms": 51}), SUITES) == [problem]
    assert plan_problems(make(load={"ttft_ms": 10, "send_lag_ms": 5}), SUITES) == []
    problem = "/gates/3/send_lag_ms: 6 ms would hide in a bound of 10 ms: at most 5"
    assert plan_problems(make(load={"ttft_ms": 10, "send_lag_ms": 6}), SUITES) == [problem]


def test_the_load_floor_is_exactly_the_least_sample_size():
    exact = load_suite(requests=44, seed=3)
    rule = {"suite": exact.digest, "requests": 44, "attainment_min": "0.9", "error_max": "0.1"}
    assert plan_problems(make(load=rule), SUITES | {exact.digest: exact}) == []
    short = load_suite(requests=43, seed=3)
    rule |= {"suite": short.digest, "requests": 43}
    assert plan_problems(make(load=rule), SUITES | {short.digest: short}) == [
        "/gates/3/requests: 43 requests cannot pass p90 with confidence 0.99, even if all are good: at least 44"
    ]


def test_a_suite_of_one_token_answers_is_refused():
    short = load_suite(prompts=[PROMPTS[0] | {"max_tokens": 1}])
    problems = plan_problems(make(load={"suite": short.digest}), SUITES | {short.digest: short})
    assert problems == ["/gates/3/suite: one: an answer of one token has no time per output token; allow two"]


def test_a_plan_that_is_not_what_the_suite_declares_is_refused():
    body = LOAD.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["plan"] = [{"at_us": place * 100_000, "prompt": "one"} for place in range(1, 65)]
    even = type(LOAD).model_validate(body)
    problems = plan_problems(make(load={"suite": even.digest}), SUITES | {even.digest: even})
    assert len(problems) == 2
    assert problems[0].startswith("/gates/3/suite: the plan does not follow a gamma")


def test_every_rule_says_what_it_can_detect():
    rule = make().gates[3]
    assert policy.minimum_detectable(rule) == stats.minimum_detectable(64, 0.1)
    assert policy.minimum_detectable(rule) == pytest.approx(0.224, abs=0.001)


def with_structured(suite=None, /, **rule):
    suite = suite or structured.suite()
    body = make().model_dump(mode="json", by_alias=True, exclude_none=True)
    body["gates"][2] = structured.rule_body(suite.digest) | rule
    return plan_problems(Policy.model_validate(body), SUITES | {suite.digest: suite})


def test_299_answers_are_the_least_that_can_prove_99_percent():
    assert with_structured() == []
    what = "298 answers (1 items, 298 times) cannot prove"
    assert with_structured(structured.suite(repeats=298)) == [
        f"/gates/2/validity_min: {what} 0.99, even if all are good: at least 299",
        f"/gates/2/truncation_max: {what} 0.01, even if all are good: at least 299",
    ]
    two = structured.suite(structured.item("a"), structured.item("b"), repeats=150)
    assert with_structured(two) == []


@pytest.mark.parametrize(
    ("rule", "start"),
    [
        ({"validity_min": "1"}, "/gates/2/validity_min: 1 cannot be proved"),
        ({"validity_min": "0"}, "/gates/2/validity_min: 0 allows everything"),
        ({"validity_min": "0.995"}, "/gates/2/validity_min: 299 answers (1 items, 299 times) cannot prove 0.995"),
        ({"truncation_max": "0"}, "/gates/2/truncation_max: 0 cannot be proved"),
        ({"truncation_max": "1"}, "/gates/2/truncation_max: 1 allows everything"),
        ({"whitespace_max": "1"}, "/gates/2/whitespace_max: 1 allows everything"),
        ({"answer_seconds": "0"}, "/gates/2/answer_seconds: no answer can come in no time"),
        ({"suite": GOLDEN.digest}, f"/gates/2/suite: {GOLDEN.digest} is no structured suite"),
        ({"suite": "sha256:" + "0" * 64}, "/gates/2/suite: no suite sha256:000"),
    ],
)
def test_a_structured_rule_that_could_never_decide_is_refused(rule, start):
    (found,) = with_structured(**rule)
    assert found.startswith(start)


def test_a_second_is_time_enough_for_an_answer():
    assert with_structured(answer_seconds="1") == []
    assert plan_problems(*make_drill(LOAD, recovery_seconds="1")) == []
    assert plan_problems(*make_drill(LOAD, cold_recovery_seconds="1")) == []


@pytest.mark.parametrize(
    ("rule", "problems"),
    [
        ({}, []),
        ({"utilization": "1"}, []),
        ({"utilization": "0"}, ["/gates/1/utilization: an engine that may use nothing holds nothing"]),
    ],
)
def test_an_engine_has_to_have_some_memory_to_use(rule, problems):
    body = make().model_dump(mode="json", by_alias=True, exclude_none=True)
    body["gates"].insert(1, {"gate": "placement", "activation_bytes": 1} | rule)
    assert plan_problems(Policy.model_validate(body), SUITES) == problems


def test_a_structured_suite_whose_instances_contradict_its_schema_is_refused():
    unfit = structured.suite(structured.item(valid=('{"n":"1"}',)))
    assert [one.split(":")[0] for one in with_structured(unfit)] == ["/gates/2/suite"]


# ------------------------------------------------------------------------------------------------ the drill


class TestDrill:
    def test_a_drill_with_a_plan_to_see_by_is_fine(self):
        assert plan_problems(*make_drill(LOAD)) == []
        for requests, rate in ((20, "10"), (2_000, "100")):
            assert plan_problems(*make_drill(load_suite(requests=requests, rate_per_second=rate))) == []

    def test_a_plan_that_begins_late_is_no_longer_for_that(self):
        # It ends 1.2 s after the window began, and takes 0.9 s.
        plan = [Arrival(at_us=300_000 + place * 20_000, prompt="one") for place in range(46)]
        late = LOAD.model_copy(update={"plan": plan})
        found = plan_problems(*make_drill(late))
        assert [one for one in found if one.startswith("/gates/4/suite: its plan is over within 1 s")]
        just = [Arrival(at_us=300_000 + place * 50_000, prompt="one") for place in range(21)]
        found = plan_problems(*make_drill(LOAD.model_copy(update={"plan": just})))
        assert not [one for one in found if one.startswith("/gates/4/suite: its plan is over")]

    def test_one_request_of_a_hundred_may_be_lost(self):
        assert plan_problems(*make_drill(LOAD, lost_max=3)) == []
        (problem,) = plan_problems(*make_drill(LOAD, lost_max=4))
        assert problem.endswith("of the 320 sent: at most 3")

    @pytest.mark.parametrize(
        ("suite", "rule", "problem"),
        [
            ({"requests": 19}, {}, "/gates/4/suite: it plans 19 requests"),
            ({"requests": 2001, "rate_per_second": "100"}, {}, "/gates/4/suite: it plans 2001 requests"),
            ({"rate_per_second": "100"}, {}, "/gates/4/suite: its plan is over within 1 s"),
            ({}, {"lost_max": 4}, "/gates/4/lost_max: 4 lost requests are more than one of 100 of the 320 sent"),
            ({}, {"recovery_seconds": "0"}, "/gates/4/recovery_seconds: no answer can come in no time"),
            ({}, {"cold_recovery_seconds": "0"}, "/gates/4/cold_recovery_seconds: no engine can boot in no time"),
        ],
    )
    def test_a_drill_that_could_show_nothing_is_refused(self, suite, rule, problem):
        found = plan_problems(*make_drill(load_suite(**suite), **rule))
        assert [one.startswith(problem) for one in found] == [True], found

    def test_it_needs_a_registered_load_suite(self):
        policy, suites = make_drill(GOLDEN)
        assert plan_problems(policy, suites) == [f"/gates/4/suite: {GOLDEN.digest} is no load suite"]
        policy, _ = make_drill(load_suite(seed=9))
        assert plan_problems(policy, SUITES)[0].endswith("is registered; push it first")

    def test_only_integrity_stands_after_it_since_it_ends_the_engine(self):
        body = make().model_dump(mode="json", by_alias=True, exclude_none=True)
        drill = {"gate": "rollback", "suite": LOAD.digest}
        with pytest.raises(ValueError, match="only integrity may stand after it"):
            Policy.model_validate(body | {"gates": [drill, *body["gates"]]})
        integrity, *others = body["gates"]
        assert Policy.model_validate(body | {"gates": [*others, drill, integrity]}).gates[-2].gate == "rollback"
