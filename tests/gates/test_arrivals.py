import itertools
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import arrivals
from schemas.suite import LoadSuite

PROMPTS = [
    {"id": name, "messages": [{"role": "user", "content": name}], "max_tokens": 8} for name in ("one", "two", "three")
]
SPEC = {
    "name": "chat",
    "prompts": PROMPTS,
    "rate_per_second": "20",
    "requests": 200,
    "warmup_requests": 20,
    "distribution": "gamma",
    "shape": "1",
    "seed": 7,
    "request_seconds": "10",
}


def suite(**changes):
    spec = {key: value for key, value in (SPEC | changes).items() if value is not None}
    return arrivals.make_suite(arrivals.LoadSpec.model_validate(spec))


def replanned(made, instants):
    plan = [{"at_us": at, "prompt": "one"} for at in instants]
    return LoadSuite.model_validate(made.model_dump(mode="json", by_alias=True, exclude_none=True) | {"plan": plan})


def test_the_same_spec_gives_the_same_suite_on_every_machine():
    assert suite().digest == suite().digest
    assert suite(seed=8).digest != suite().digest
    assert [arrival.at_us for arrival in suite().plan[:4]] == [42870, 72250, 89593, 166576]
    assert [arrival.prompt for arrival in suite().plan[:4]] == ["two", "one", "three", "one"]


def test_the_last_arrival_is_at_requests_over_rate_for_every_seed():
    for seed in range(5):
        made = suite(seed=seed)
        assert made.plan[-1].at_us == 10_000_000
        assert made.warmup[-1].at_us == 1_000_000
        assert len(made.plan) == 200
        assert len(made.warmup) == 20


def test_each_prompt_is_sent_equally_often_in_a_drawn_order():
    made = suite()
    order = [arrival.prompt for arrival in made.plan]
    assert sorted(Counter(order).values()) == [66, 67, 67]
    assert order[:9] != ["one", "two", "three"] * 3


def test_a_constant_plan_has_equal_gaps_to_the_microsecond():
    made = suite(distribution="constant", shape=None, rate_per_second="30")
    gaps = arrivals.plan_gaps(made)
    assert set(gaps) <= {33333, 33334}
    assert arrivals.plan_faults(made) == []


@given(st.sampled_from(["0.5", "1", "2", "10"]), st.integers(0, 10_000), st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_a_drawn_plan_is_in_order_and_looks_like_its_process(shape, seed, requests):
    made = suite(shape=shape, seed=seed, requests=requests)
    instants = [arrival.at_us for arrival in made.plan]
    assert all(a <= b for a, b in itertools.pairwise(instants))
    assert arrivals.plan_faults(made) == []


def test_a_smaller_shape_is_burstier():
    def variation(shape):
        gaps = arrivals.plan_gaps(suite(shape=shape, requests=2000))
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert variation("0.25") == pytest.approx(2.0, rel=0.15)
    assert variation("1") == pytest.approx(1.0, rel=0.1)
    assert variation("16") == pytest.approx(0.25, rel=0.1)


def test_a_plan_at_another_rate_than_declared_is_found():
    made = suite()
    slow = replanned(made, [arrival.at_us * 2 for arrival in made.plan])
    assert "does not follow a gamma of shape 1 at 20 requests a second" in arrivals.plan_faults(slow)[0]


def test_a_plan_with_equal_gaps_is_no_poisson_plan():
    made = suite()
    assert arrivals.plan_faults(replanned(made, [place * 50_000 for place in range(1, 201)]))


def test_a_plan_from_two_workers_with_one_seed_is_found():
    made = suite(requests=100)
    gaps = arrivals.plan_gaps(made)
    copied = list(itertools.accumulate(gaps + gaps))
    faults = arrivals.plan_faults(replanned(made, copied))
    assert faults == ["the plan has 100 distinct gaps where 200 are expected"]


def test_all_at_once_is_no_plan():
    made = suite(distribution="constant", shape=None)
    assert "200 of 200 gaps" in arrivals.plan_faults(replanned(made, [0] * 200))[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate_per_second": "0"}, "rate_per_second must be above 0"),
        ({"shape": "0"}, "shape must be from"),
        ({"shape": None}, "shape is given exactly for a gamma"),
        ({"distribution": "constant"}, "shape is given exactly for a gamma"),
        ({"request_seconds": "0"}, "request_seconds must be above 0"),
        ({"requests": 0}, "greater than or equal to 1"),
        ({"warmup_requests": 0}, "greater than or equal to 1"),
        ({"prompts": [PROMPTS[0], PROMPTS[0]]}, "must not repeat"),
        ({"prompts": []}, "at least 1"),
        ({"rates": "2"}, "Extra inputs"),
    ],
)
def test_a_spec_that_describes_no_load_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        suite(**changes)


def test_a_decimal_rate_is_kept_exactly():
    made = suite(rate_per_second="0.1", requests=5)
    assert made.process.rate_per_second == Decimal("0.1")
    assert made.plan[-1].at_us == 50_000_000
