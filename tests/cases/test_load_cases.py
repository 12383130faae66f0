"""Incident cases about load reports: numbers that look plausible one by one and cannot all be true."""

from typing import Any

import pytest

from gates.gate import JudgeInput
from gates.load_judgement import judge
from registry import jobs
from schemas.problems import InvalidDocument
from schemas.result import Verdict
from schemas.runner import Report
from tests.gates.test_load_judgement import RULE, SUITE, good_records, put
from tests.registry.test_jobs import claim, job


def number(name: str, statistic: str, value: float | None, n: int = 200, **more: Any) -> dict[str, Any]:
    return {"name": name, "unit": more.pop("unit", "ms"), "statistic": statistic, "value": value, "n": n, **more}


REPORTS = {
    "peak below the average": [
        number("output_throughput", "mean", 410.61),
        number("output_throughput", "peak", 113.0),
    ],
    "median above p99": [number("ttft", "p50", 900.0), number("ttft", "p99", 90.0)],
    "good and failed requests that are not all": [
        number("attainment", "value", 0.9, unit="ratio", k=180),
        number("error_ratio", "value", 0.2, unit="ratio", k=40),
    ],
    "a duration of nothing": [number("requests", "value", 200.0), number("rate", "mean", None)],
}


@pytest.mark.parametrize("report", REPORTS)
def test_c129_an_impossible_report_is_no_pass_and_both_fields_are_named(service, actor, report) -> None:
    job(service, actor)
    held = claim(service, actor)
    body = {
        "gate": "compatibility",
        "definition": "sha256:" + "d" * 64,
        "verdict": "passed",
        "summary": "as fast as ever",
        "measurements": REPORTS[report],
        "findings": [],
        "duration_ms": 5,
        "source": "run",
    }

    def said(result: dict[str, Any]) -> None:
        told = Report(fencing_token=held.fencing_token, act="gate:x", kind="gate_recorded", body=result)
        with service.database.transaction() as session:
            jobs.report(session, service, actor.project_id, held.job, told)

    with pytest.raises(InvalidDocument) as refused:
        said(body)
    places = [one["pointer"] for one in refused.value.members["errors"]]
    assert places == ["/body/measurements/0", "/body/measurements/1"]
    with service.database.transaction() as session:
        assert jobs.results(session, jobs.get(session, actor.project_id, held.job)) == []
    said(body | {"verdict": "inconclusive"})  # which lets nothing through


def broken(name: str) -> dict[str, Any]:
    records = good_records(SUITE)
    match name:
        case "no tokens in answers that succeeded":
            for row in records["requests"]:
                put(row, completion_tokens=0, events=0)
        case "fewer requests than were planned":
            records["requests"].pop()
        case "a generator that ran for no time":
            records["harness"]["wall_us"] = 0
        case "a last token before the first":
            put(records["requests"][3], token_us=9_000_000)
    return records


@pytest.mark.parametrize(
    "name",
    [
        "no tokens in answers that succeeded",
        "fewer requests than were planned",
        "a generator that ran for no time",
        "a last token before the first",
    ],
)
def test_c129_records_that_cannot_be_lead_to_no_verdict_on_the_candidate(name) -> None:
    assert judge(JudgeInput(RULE, good_records(SUITE), None, SUITE)).verdict is Verdict.PASSED
    assert judge(JudgeInput(RULE, broken(name), None, SUITE)).verdict is Verdict.ERRORED
