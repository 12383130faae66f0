"""Golden references: of two who set one at once, one does; nobody takes the place of what they did not see."""

import pytest

from registry import jobs, runners, runs
from registry.tables import JobRow
from schemas.api import Complete, RecordCreate
from schemas.common import canonical_json
from schemas.problems import Conflict, StaleEdit
from schemas.runner import Claim, RunnerRegistration
from tests.support.factories import created_target, reference_body, registered_bundle, registered_golden
from tests.support.together import together
from tests.support.world import FINGERPRINT

TARGET = "chat@prod"
ROUNDS = 4


@pytest.fixture
def author(api):
    return api.actor("engineer")


@pytest.fixture
def suite(api, author):
    created_target(api.service, author, TARGET)
    return registered_golden(api.service, author)


def asked(suite, bundle, expected=None):
    return RecordCreate(suite=suite.digest, bundle=bundle.digest, target=TARGET, expected=expected, reason="read")


def claimed(api, author, name="r1"):
    registration = RunnerRegistration.model_validate(
        {"name": name, "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"], "boot_id": name}
    )
    with api.service.database.transaction() as session:
        return jobs.claim(session, api.service, runners.register(session, author.project_id, registration))


def answered(api, author, suite, claim, **changes):
    """Hand in what a job's bundle answered, and return the reference."""
    raw = canonical_json(reference_body(suite, claim.bundle) | changes)
    with api.service.database.transaction() as session:
        row = runs.store_reference(session, api.service, author.project_id, claim.job, claim.fencing_token, raw)
        return row.reference


def in_force(clients):
    return clients["manager"].targets.get(TARGET).references


def row(api, claim):
    with api.service.database.transaction() as session:
        return session.get_one(JobRow, claim.job)


def test_a_reference_takes_the_place_of_the_one_that_was_seen_and_of_no_other(api, author, suite, clients, sound):
    manager, admin = clients["manager"].runs, clients["admin"].runs
    a, b = (registered_bundle(api.service, author, name, name.encode()) for name in "ab")
    manager.record(asked(suite, a))
    first = answered(api, author, suite, claimed(api, author))
    assert in_force(clients) == {suite.digest: first}
    seen = clients["manager"].targets.get(TARGET).generation
    for stale in (None, "sha256:" + "f" * 64):
        with pytest.raises(Conflict, match="set by manager") as refused:
            admin.record(asked(suite, b, stale))
        told = refused.value.members
        assert (told["reference"], told["changed_by"], told["version"]) == (first, "manager", str(seen))
        assert told["change"] == "reference_set"
    with pytest.raises(StaleEdit):
        admin.record(asked(suite, b), if_match=str(seen - 1))
    with pytest.raises(Conflict):
        admin.record(asked(suite, b, "sha256:" + "f" * 64), if_match=str(seen))
    for ask, bundle in (({"expected": first}, b), ({}, a)):
        now = clients["admin"].targets.get(TARGET).generation
        admin.record(asked(suite, bundle, **ask), if_match=None if ask else str(now))
        claim = claimed(api, author)
        reference = answered(api, author, suite, claim)
        assert answered(api, author, suite, claim) == reference  # told again, since no answer came: nothing changes
        # Nor where it was measured anew, since whoever measured first was lost before the end.
        assert answered(api, author, suite, claim, hardware="another") == reference
        assert in_force(clients) == {suite.digest: reference}
        assert clients["admin"].targets.get(TARGET).generation == now + 1


def test_of_two_recordings_under_way_the_first_to_answer_is_set_and_the_other_is_told_by_whom(
    api, author, suite, clients, sound
):
    before = None
    for round_ in range(ROUNDS):
        a, b = (registered_bundle(api.service, author, f"{name}{round_}", f"{name}{round_}".encode()) for name in "ab")
        clients["manager"].runs.record(asked(suite, a, before))
        clients["admin"].runs.record(asked(suite, b, before))
        claims: list[Claim] = [claimed(api, author, f"r{round_}{n}") for n in range(2)]
        outcomes = together(*(lambda c=claim: answered(api, author, suite, c) for claim in claims))
        assert sorted(type(one).__name__ for one in outcomes) == ["Conflict", "str"], outcomes
        (won,) = [place for place, one in enumerate(outcomes) if isinstance(one, str)]
        assert in_force(clients) == {suite.digest: outcomes[won]}
        refused, loser = outcomes[1 - won], claims[1 - won]
        assert refused.members["reference"] == outcomes[won]
        assert refused.members["changed_by"] == row(api, claims[won]).created_by
        # The runner says so, and the bundle is not booted again for what would be refused.
        told = Complete(fencing_token=loser.fencing_token, problem=refused.kind, detail=refused.detail)
        with api.service.database.transaction() as session:
            jobs.complete(session, api.service, author.project_id, loser.job, told)
        with api.service.database.transaction() as session:
            done = Complete(fencing_token=claims[won].fencing_token)
            jobs.complete(session, api.service, author.project_id, claims[won].job, done)
        ended = row(api, loser)
        assert (ended.state, ended.reference) == ("done", None)
        assert "set by" in ended.problem
        before = outcomes[won]


def test_a_recording_that_waits_ends_when_another_reference_was_set_and_boots_nothing(
    api, author, suite, clients, sound
):
    a, b = (registered_bundle(api.service, author, name, name.encode()) for name in "ab")
    clients["manager"].runs.record(asked(suite, a))
    late = clients["admin"].runs.record(asked(suite, b))
    set_ = answered(api, author, suite, claimed(api, author))
    assert claimed(api, author, "r2") is None
    ended = clients["admin"].runs.get(late.id)
    assert (ended.state, ended.outcome) == ("done", None)
    assert ended.problem.startswith(f"conflict: the reference of {TARGET} for golden suite {suite.digest} is {set_}")
    assert in_force(clients) == {suite.digest: set_}


def test_a_recording_of_an_older_version_that_waits_over_a_reference_in_force_exchanges_nothing(
    api, author, suite, clients
):
    """It noted none that it is to take the place of: that is right where there is none, and else nobody can tell."""
    a, b = (registered_bundle(api.service, author, name, name.encode()) for name in "ab")
    clients["admin"].runs.record(asked(suite, a))
    first = answered(api, author, suite, claimed(api, author))
    late = clients["admin"].runs.record(asked(suite, b, first))
    with api.service.database.transaction() as session:  # its own entry would say so too
        session.get_one(JobRow, late.id).references = {}
    assert claimed(api, author, "r2") is None
    ended = clients["admin"].runs.get(late.id)
    assert (ended.state, ended.outcome) == ("done", None)
    assert "`--expect REFERENCE` or `--if-match GENERATION`" in ended.problem
    assert in_force(clients) == {suite.digest: first}
