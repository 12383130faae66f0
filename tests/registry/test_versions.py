"""Versions beside each other: what one does not understand of the other it refuses, and never guesses."""

import pytest
from pydantic import ValidationError

from registry import db
from registry.auth import Actor
from registry.client import Client
from registry.service import Service
from registry.tables import JobRow
from schemas.api import LimitsSet
from schemas.runner import RunnerRegistration
from tests.registry.test_scheduling import (
    DRILLED,
    H100,
    ask,
    bundle,
    change,
    claim,
    register,
    shown,
    shown_needs,
    taken,
)
from tests.support import factories, phases
from tests.support.api import Api
from tests.support.world import FINGERPRINT


def drilled(service: Service, actor: Actor, count: int) -> JobRow:
    """Ask for a drill whose two bundles take so many accelerators each."""
    target = factories.created_target(service, actor)
    policy = factories.registered_policy(service, actor).digest
    phases.promoted(service, actor, bundle(service, actor, "accepted", count), policy)
    made = ask(service, actor, bundle(service, actor, "candidate", count), gates=DRILLED, target=target)
    with service.database.transaction() as session:
        return session.get_one(JobRow, made)


def test_an_older_runner_gets_no_drill_whose_accelerators_it_would_give_to_one_engine(
    service: Service, actor: Actor
) -> None:
    made = drilled(service, actor, 1)
    old = register(service, actor, "old", H100, H100, speaks=None)
    assert claim(service, actor, old) is None
    assert str(shown(service, actor, made.id).waits).endswith("of both; bring the runner up to date")
    assert taken(service, actor, register(service, actor, "old", H100, H100)).devices == [0, 1]


def test_an_older_runner_drills_where_there_are_no_accelerators(service: Service, actor: Actor) -> None:
    made = drilled(service, actor, 0)
    assert taken(service, actor, register(service, actor, "old", speaks=None)).job == made.id


def test_what_an_older_service_cannot_read_of_a_runner_it_refuses() -> None:
    body = {"name": "r1", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": [], "boot_id": "b"}
    assert RunnerRegistration.model_validate(body).speaks is None
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunnerRegistration.model_validate(body | {"something_later": 1})


def test_what_a_later_version_asks_for_is_given_to_nobody_and_keeps_nobody_waiting(
    service: Service, actor: Actor
) -> None:
    runner = register(service, actor, "r1")
    later, mine = ask(service, actor, bundle(service, actor)), ask(service, actor, bundle(service, actor, "two"))
    change(service, later, needs=shown_needs(service, later) | {"something_later": 1})
    assert taken(service, actor, runner).job == mine
    assert claim(service, actor, runner) is None
    assert "for a service of the version that made it" in str(shown(service, actor, later).waits)
    # Where such a job runs, whatever takes memory waits.
    with service.database.transaction() as session:
        change(service, mine, needs=shown_needs(service, later), lease_until=db.now(session).replace(year=2100))
    third = ask(service, actor, bundle(service, actor, "three"))
    assert claim(service, actor, runner) is None
    assert "r1 has reserved 1.1 of 1.1 GB" in str(shown(service, actor, third).waits)


def test_limits_that_a_client_does_not_name_stay(stack: Api) -> None:
    with Client(stack.url, stack.tokens["admin"]) as client:
        client.projects.set_limits("default", LimitsSet(bytes=10**9, jobs=3, runner_seconds=60))
        own = client.projects.set_limits("default", LimitsSet(jobs=4)).own_limits
        assert (own.bytes, own.uploads, own.jobs, own.runner_seconds) == (10**9, None, 4, 60)
        own = client.projects.set_limits("default", LimitsSet(bytes=None, documents=0)).own_limits
        assert (own.bytes, own.documents, own.jobs) == (None, 0, 4)
