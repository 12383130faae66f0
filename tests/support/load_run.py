"""A load run as it would be recorded, whole and good, to be spoilt by a test."""

from typing import Any

from gates import arrivals
from gates.load_records import COLUMNS
from schemas.policy import LoadRule
from schemas.suite import LoadSpec, LoadSuite

Row = list[Any]

PROMPTS = [{"id": "one", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 16}]


def load_suite(requests: int = 64, **changes: Any) -> LoadSuite:
    spec = {
        "name": "chat",
        "prompts": PROMPTS,
        "rate_per_second": "20",
        "requests": requests,
        "warmup_requests": 4,
        "distribution": "gamma",
        "shape": "1",
        "seed": 5,
        "request_seconds": "5",
    } | changes
    return arrivals.make_suite(LoadSpec.model_validate(spec))


def load_rule(suite: LoadSuite, **changes: Any) -> LoadRule:
    body = {
        "gate": "load",
        "suite": suite.digest,
        "percentile": "0.9",
        "confidence": "0.99",
        "requests": len(suite.plan),
        "ttft_ms": 500,
        "tpot_ms": 50,
        "e2e_ms": 2000,
        "attainment_min": "0.9",
        "error_max": "0.06",
        "send_lag_ms": 20,
    }
    return LoadRule.model_validate(body | changes)


def good_row(
    number: int,
    at_us: int,
    prompt: str = "one",
    *,
    lag: int = 500,
    ttft_ms: float = 40.0,
    tokens: int = 8,
    tpot_ms: float = 5.0,
) -> Row:
    token = at_us + round(ttft_ms * 1000)
    finish = token + round(tpot_ms * 1000) * (tokens - 1)
    row = {
        "number": number,
        "prompt": prompt,
        "at_us": at_us,
        "sent_us": at_us + lag,
        "headers_us": at_us + lag + 100,
        "event_us": token,
        "token_us": token,
        "last_us": finish,
        "finish_us": finish,
        "done_us": finish + 100,
        "status": 200,
        "outcome": "ok",
        "detail": None,
        "finish_reason": "stop",
        "prompt_tokens": 23,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "events": tokens - 1,
        "output": "0" * 64,
    }
    return list(row.values())


def put(row: Row, **values: Any) -> None:
    for name, value in values.items():
        row[COLUMNS.index(name)] = value


def break_row(row: Row, outcome: str = "http_5xx") -> None:
    """Turn a request into a failure that came at once."""
    sent = row[COLUMNS.index("sent_us")]
    nothing = ("headers_us", "event_us", "token_us", "last_us", "finish_us", "finish_reason", "output")
    put(row, **dict.fromkeys((*nothing, "prompt_tokens", "completion_tokens", "cached_tokens")))
    put(row, outcome=outcome, done_us=sent + 1000, events=0, status=500, detail="500: no")


def good_records(suite: LoadSuite, **row: Any) -> dict[str, Any]:
    start = suite.warmup[-1].at_us
    first = len(suite.warmup)
    return {
        "columns": list(COLUMNS),
        "warmup": [good_row(number, each.at_us - start, each.prompt) for number, each in enumerate(suite.warmup)],
        "requests": [
            good_row(first + number, each.at_us, each.prompt, **row) for number, each in enumerate(suite.plan)
        ],
        "harness": {
            "loop_lag_us": [300] * 100,
            "cpu_us": 100_000,
            "wall_us": 4_000_000,
            "in_flight_max": 5,
            "cap": 4096,
            "has_precedence": True,
            "origin_unix_us": 1,
            "client": "test",
        },
        "engine_pids": [7, 7],
    }
