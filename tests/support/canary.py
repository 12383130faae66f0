"""Lines of a gateway's access log, good and bad, and tallies of them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import strategies as st

from gates.router import Arm, Split
from gates.tally import LogRecord, Tally
from schemas.policy import ErrorRatioCondition, Step, TtftCondition

T0 = datetime(2026, 11, 3, 14, 0, tzinfo=UTC)
STABLE = Arm("stable", "chat@prod/aaaaaaaaaaaa/r1", "127.0.0.1:8001", 7_500)
CANDIDATE = Arm("candidate", "chat@prod/bbbbbbbbbbbb/r2", "127.0.0.1:8002", 2_500)
SPLIT = Split("chat@prod", 7, (STABLE, CANDIDATE))
STEP = Step(weight_bp=2_500, hold_seconds=Decimal(30), min_requests=60, max_seconds=Decimal(120))
ERRORS = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal("0.05"))
TTFT = TtftCondition(metric="ttft", percentile=Decimal("0.9"), max_ms=400)
CONDITIONS = (ERRORS, TTFT)
GOOD = LogRecord(
    at=T0 + timedelta(seconds=1),
    target="chat@prod",
    route="split",
    revision=7,
    method="POST",
    assigned=f"{CANDIDATE.cluster}+{STABLE.cluster}",
    served=CANDIDATE.address,
    code=200,
    flags=frozenset(),
    details="via_upstream",
    attempts=1,
    ttft_ms=120.0,
    duration_ms=900.0,
    is_event_stream=True,
)
ON_STABLE = replace(GOOD, assigned=STABLE.cluster, served=STABLE.address)
CUT = replace(GOOD, flags=frozenset({"UPE"}))
SLOW = replace(GOOD, ttft_ms=900.0)
PROBE = replace(GOOD, route="probe", assigned=None, served=None, attempts=0, ttft_ms=None, duration_ms=0.0)


def tally(*groups: tuple[LogRecord, int], split: Split = SPLIT, garbled: int = 0, lost: bool = False) -> Tally:
    found = Tally(split, T0)
    for record, times in groups:
        found.add([record] * times)
    found.add([], garbled=garbled, lost=lost)
    found.see(T0, {"stable": 0, "candidate": 0})
    return found


records = st.builds(
    replace,
    st.sampled_from([GOOD, ON_STABLE, CUT, SLOW, PROBE]),
    code=st.sampled_from([0, 200, 400, 500]),
    flags=st.sampled_from([frozenset(), frozenset({"DC"}), frozenset({"UPE"}), frozenset({"UH"})]),
    attempts=st.integers(0, 2),
    ttft_ms=st.none() | st.floats(0, 5_000),
    revision=st.sampled_from([6, 7]),
)
