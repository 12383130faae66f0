"""Why a release holds is said anew when it is another reason, and only then."""

from uuid import UUID

import pytest

from registry import releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.evidence import Kind, Note
from tests.support import factories, phases
from workers import holds
from workers.control import Control

SILENT = "the gateway has not answered for {} s: no socket"


@pytest.fixture
def release(service: Service, actor: Actor) -> UUID:
    return phases.in_canary(service, actor)


def hold(service: Service, release: UUID, *reasons: str, name: str = "held:x", cause: str = "step_errored") -> None:
    control = Control(service, lambda _: None)
    with service.database.transaction() as session:
        control.hold(session, session.get_one(ReleaseRow, release, with_for_update=True), name, list(reasons), cause)


def said(service: Service, release: UUID) -> list[list[str]]:
    with service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        found = [body.reasons for _, body in holds.standing(releases.log(session, release))]
        assert row.held == (found[-1] if found else [])
        return found


def is_renewable(service: Service, release: UUID) -> bool:
    with service.database.transaction() as session:
        return holds.is_renewable(session, session.get_one(ReleaseRow, release))


def test_another_reason_is_an_entry_and_a_number_that_counts_on_is_none(service: Service, release: UUID) -> None:
    for seconds in (11, 12, 13.5):
        hold(service, release, SILENT.format(seconds))
    assert said(service, release) == [[SILENT.format(11)]]
    hold(service, release, "lines of the access log are missing")
    hold(service, release, SILENT.format(99))
    hold(service, release, SILENT.format(100), "lines of the access log are missing")
    hold(service, release, "lines of the access log are missing", SILENT.format(101))
    assert said(service, release) == [
        [SILENT.format(11)],
        ["lines of the access log are missing"],
        [SILENT.format(99)],
        [SILENT.format(100), "lines of the access log are missing"],
    ]


def test_a_step_that_cannot_be_judged_says_why_anew_but_not_all_the_time(
    service: Service, release: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_renewable(service, release)
    hold(service, release, "one")
    assert not is_renewable(service, release)
    monkeypatch.setattr(holds, "RENEWED_SECONDS", 0.0)
    assert is_renewable(service, release)
    hold(service, release, "the other", cause="not_eligible")
    assert not is_renewable(service, release)


def test_what_a_release_held_for_before_it_went_on_is_no_reason_any_more(service: Service, release: UUID) -> None:
    hold(service, release, "one", cause="step_inconclusive")
    factories.record_act(service, release, Kind.RESUMED, Note(reason="a test"))
    assert said(service, release) == []
    hold(service, release, "the other", name="held:y")
    assert said(service, release) == [["the other"]]


def test_what_is_said_in_brackets_makes_no_other_reason() -> None:
    mismatch = "split mismatch: 3 of 90 requests went to the candidate{} where 50.00% is desired"
    assert not holds.is_other([mismatch.format("")], [mismatch.format(" (2 of its requests are open)")])
    assert holds.is_other(["golden ran too long ago"], ["load ran too long ago"])
    assert not holds.is_other(["a\0b 1"], ["a\ufffdb 2.5"])
