"""The bench's parts, at a size that tells nothing of speed."""

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow
from tests.bench.boot import __main__ as program
from tests.bench.boot.boots import Took, timed
from tests.bench.boot.idle import add_jobs
from tests.support import factories


def test_boots_are_timed_by_what_evidence_says(service: Service, tmp_path: Path) -> None:
    took, _, _ = timed(service, tmp_path, 1)
    assert {one.name: len(one.ms) for one in took} == {
        "claim to launch, gates, files new": 1,
        "claim to launch, gates, files there": 1,
        "claim to launch, live replica": 1,
        "ready to first gate": 2,
    }
    # The kernel counts a process's start in steps of 10 ms.
    assert all(-20 < ms < 60_000 for one in took for ms in one.ms)


def test_releases_get_the_jobs_that_runners_did_for_them(service: Service, actor: Actor) -> None:
    factories.started_release(service, actor)
    with service.database.transaction() as session:
        add_jobs(session)
        made = session.scalars(select(JobRow)).all()
    assert Counter((one.kind, one.state) for one in made) == {("evaluate", "done"): 1, ("serve", "cancelled"): 1}


def test_what_misses_its_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    took = Took("claim to launch", ms=[10.0] * 8 + [301.0] * 2)
    assert program._judged(took, 300.0) == ["claim to launch: p90 is 301 ms, over 300"]
    assert program._judged(Took("claim to launch", ms=[10.0] * 10), 300.0) == []
    assert capsys.readouterr().out.count("claim to launch") == 2
