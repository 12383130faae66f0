"""Aliases that are protected by pattern: who may move which, made or not, and of two at once one is first."""

import pytest
from sqlalchemy import text

from registry import alias_patterns, evidence, verification
from registry.client import Client
from schemas.alias import Alias, AliasPattern
from schemas.api import TokenCreate
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    InvalidDocument,
    NotFound,
    NotPermitted,
    Problem,
    StaleEdit,
)
from tests.support.holdings import held
from tests.support.together import together

ROLES = ("viewer", "ci", "engineer", "manager", "admin")


@pytest.fixture
def author(api):
    return api.actor("engineer")


def movers(clients, name, digest):
    """Return the roles that may make, move and take away an alias."""
    able, refused = [], set()
    for role in ROLES:
        try:
            clients[role].aliases.set(name, digest, "x")
            clients[role].aliases.delete(name, "x")
        except NotPermitted as problem:
            refused.add((role, tuple(problem.members["allowed"])))
        else:
            able.append(role)
    assert all(role not in allowed for role, allowed in refused)
    return able


@pytest.mark.parametrize(
    ("pattern", "name", "is_fit"),
    [
        ("prod-*", "prod-eu", True),
        ("prod-*", "prod-", True),
        ("prod-*", "prod", False),
        ("prod-*", "my-prod-eu", False),
        ("*-live", "eu-live", True),
        ("*", "anything", True),
        ("a*b*c", "abc", True),
        ("a*b*c", "acb", False),
        ("v1.*", "v1.2", True),
        ("v1.*", "v1x2", False),
        ("*a" * 30 + "*b*", "a" * 63, False),
        ("ab*ba", "aba", False),
        ("a*b*", "acbc", True),
    ],
)
def test_a_star_stands_for_any_letters_and_nothing_else_does(pattern, name, is_fit):
    assert alias_patterns.fits(pattern, name) is is_fit


def test_a_pattern_says_who_makes_moves_and_takes_away_what_it_fits_and_the_fewest_may(api, clients, author, sound):
    digest = held(api.service, author, "a").digest
    manager, admin = clients["manager"].aliases, clients["admin"].aliases
    assert movers(clients, "prod-eu", digest) == ["ci", "engineer", "manager", "admin"]
    shown = manager.protect_pattern("prod-*", "engineer", "no pipeline")
    assert (shown.pattern, shown.movers, shown.set_by) == ("prod-*", "engineer", "manager")
    assert movers(clients, "prod-eu", digest) == ["engineer", "manager", "admin"]
    assert movers(clients, "trial", digest) == ["ci", "engineer", "manager", "admin"]
    assert manager.protect_pattern("prod-*", "engineer", "again") == shown
    manager.protect_pattern("*-eu", "manager", "the region's")
    assert movers(clients, "prod-eu", digest) == ["manager", "admin"]
    assert movers(clients, "prod-us", digest) == ["engineer", "manager", "admin"]
    admin.protect_pattern("prod-*", "admin", "an audit", expected="engineer")
    assert movers(clients, "prod-us", digest) == ["admin"]
    assert [(one.pattern, one.movers) for one in clients["viewer"].aliases.patterns()] == [
        ("*-eu", "manager"),
        ("prod-*", "admin"),
    ]
    admin.set("prod-us", digest, "x")
    found = admin.get("prod-us")
    assert (found.movers, found.patterns, found.is_protected) == ("admin", ["prod-*"], False)
    assert [(one.movers, one.patterns) for one in admin.list()] == [("admin", ["prod-*"])]
    # Nobody loosens what is for a role above their own, and a pattern that is gone protects nothing.
    for act in (
        lambda: manager.protect_pattern("prod-*", "engineer", "x"),
        lambda: manager.remove_pattern("prod-*", "x"),
        lambda: manager.protect_pattern("other-*", "admin", "x"),
    ):
        with pytest.raises(NotPermitted):
            act()
    assert admin.remove_pattern("prod-*", "the audit is over").movers == "admin"
    assert movers(clients, "prod-us2", digest) == ["ci", "engineer", "manager", "admin"]
    with pytest.raises(NotFound):
        admin.remove_pattern("prod-*", "x")
    with api.service.database.transaction() as session:
        log = [(one.kind, one.actor) for one in evidence.read(session, alias_patterns.stream(api.project_id))]
    assert log == [
        ("alias_pattern_set", "manager"),
        ("alias_pattern_set", "manager"),
        ("alias_pattern_set", "admin"),
        ("alias_pattern_removed", "admin"),
    ]


def test_protection_of_its_own_counts_beside_the_patterns(api, clients, author, sound):
    digest = held(api.service, author, "a").digest
    manager = clients["manager"].aliases
    manager.protect_pattern("prod*", "engineer", "x")
    manager.set("prod", digest, "x")
    assert manager.protect("prod", "x").movers == "manager"
    with pytest.raises(NotPermitted, match="by the pattern prod"):
        clients["engineer"].aliases.delete("prod", "x")
    assert manager.protect("prod", "x", is_protected=False).movers == "engineer"
    clients["engineer"].aliases.delete("prod", "x")


def test_only_managers_of_the_whole_project_set_patterns_and_what_is_none_is_told(api, clients, author, sound):
    for role in ("viewer", "ci", "engineer"):
        with pytest.raises(NotPermitted):
            clients[role].aliases.protect_pattern("prod-*", "engineer", "x")
    limited = TokenCreate(name="kim", role="manager", targets=["chat@prod"])
    digest = held(api.service, author, "a").digest
    with Client(api.url, clients["admin"].tokens.create(limited).secret) as kim:
        with pytest.raises(NotPermitted):
            kim.aliases.protect_pattern("prod-*", "manager", "x")
        clients["manager"].aliases.protect_pattern("prod-*", "engineer", "x")
        with pytest.raises(NotPermitted):
            kim.aliases.set("prod-eu", digest, "x")
        kim.aliases.set("trial", digest, "x")
    post = api.clients["manager"].post
    for body in (
        {"pattern": "prod", "movers": "manager", "reason": "x"},
        {"pattern": "Prod-*", "movers": "manager", "reason": "x"},
        {"pattern": "a" * 63 + "*", "movers": "manager", "reason": "x"},
        {"pattern": "prod-*", "movers": "ci", "reason": "x"},
        {"pattern": "prod-*", "movers": "manager", "reason": ""},
    ):
        assert post("/v1/alias-patterns", json=body).status_code == 422


def test_a_project_has_so_many_patterns_and_no_more(api, clients, monkeypatch, sound):
    monkeypatch.setattr(alias_patterns, "MOST", 2)
    manager = clients["manager"].aliases
    for pattern in ("a*", "b*"):
        manager.protect_pattern(pattern, "manager", "x")
    with pytest.raises(Conflict, match="at most 2"):
        manager.protect_pattern("c*", "manager", "x")
    assert manager.protect_pattern("a*", "engineer", "x", expected="manager").movers == "engineer"


def test_what_a_pattern_fits_names_no_quarantined_bundle(api, clients, author, sound):
    good, bad = (held(api.service, author, name).digest for name in ("good", "bad"))
    manager = clients["manager"]
    manager.aliases.set("prod-eu", bad, "x")
    manager.bundles.quarantine(bad, "withdrawn")
    with pytest.raises(BundleQuarantined, match="withdrawn"):
        manager.aliases.protect_pattern("prod-*", "manager", "x")
    assert list(manager.aliases.patterns()) == []
    manager.aliases.set("prod-eu", good, "x", expected=bad)
    manager.aliases.protect_pattern("prod-*", "engineer", "x")
    with pytest.raises(BundleQuarantined):
        manager.aliases.set("prod-us", bad, "x")


def test_of_a_pattern_and_an_alias_at_once_one_is_first(api, clients, author, sound):
    digest = held(api.service, author, "a").digest
    for round_ in range(4):
        acts = [
            lambda n=round_: clients["manager"].aliases.protect_pattern(f"r{n}-*", "manager", "x"),
            lambda n=round_: clients["ci"].aliases.set(f"r{n}-a", digest, "x"),
        ]
        said, made = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert isinstance(said, AliasPattern)
        assert isinstance(made, Alias | NotPermitted), made
        with pytest.raises(Problem):
            clients["ci"].aliases.delete(f"r{round_}-a", "x")


def test_a_pattern_is_changed_only_as_it_was_seen_and_the_refusal_says_who_changed_it(api, clients, sound):
    manager, admin = clients["manager"].aliases, clients["admin"].aliases
    with pytest.raises(Conflict, match="is not there, and was expected to be for the role manager"):
        manager.protect_pattern("prod-*", "engineer", "x", expected="manager")
    first = manager.protect_pattern("prod-*", "manager", "x")
    other = manager.protect_pattern("other-*", "manager", "x")
    assert (first.generation, other.generation) == (1, 2)
    for expected in (None, "admin"):
        with pytest.raises(Conflict) as refused:
            admin.protect_pattern("prod-*", "engineer", "x", expected=expected)
        members = refused.value.members
        assert (members["movers"], members["version"], members["changed_by"]) == ("manager", "1", "manager")
        assert members["change"] == "alias_pattern_set"
    second = admin.protect_pattern("prod-*", "engineer", "x", if_match=str(first.generation))
    assert (second.movers, second.generation) == ("engineer", 3)
    assert manager.protect_pattern("prod-*", "engineer", "x", if_match="1") == second
    for act in (
        lambda: manager.protect_pattern("prod-*", "manager", "x", if_match="1"),
        lambda: manager.protect_pattern("prod-*", "manager", "x", if_match="1", expected="engineer"),
        lambda: manager.remove_pattern("prod-*", "x", if_match="1"),
    ):
        with pytest.raises(StaleEdit, match=r"is 3 now, not .*1.*; the latest change is alias_pattern_set by admin"):
            act()
    with pytest.raises(Conflict):
        manager.protect_pattern("prod-*", "manager", "x", if_match="3", expected="admin")
    assert manager.remove_pattern("prod-*", "x", if_match="3") == second
    with pytest.raises(StaleEdit, match=r"is 0 now.* alias_pattern_removed by manager"):
        admin.remove_pattern("prod-*", "x", if_match="3")
    answer = api.clients["manager"].post(
        "/v1/alias-patterns", json={"pattern": "prod-*", "movers": "manager", "reason": "x"}
    )
    assert answer.headers["etag"] == f'"{answer.json()["generation"]}"' == '"5"'
    assert manager.patterns()[0] == other


def test_of_two_who_change_a_pattern_at_once_one_does_and_the_other_is_told_what_it_is(api, clients, sound):
    manager, admin = clients["manager"].aliases, clients["admin"].aliases
    for round_ in range(4):
        pattern = f"r{round_}-*"
        for expected in (None, "engineer"):
            if expected is not None:
                manager.protect_pattern(pattern, expected, "the next race", if_match="*")
            done = together(
                lambda p=pattern, e=expected: manager.protect_pattern(p, "manager", "x", expected=e),
                lambda p=pattern, e=expected: admin.protect_pattern(p, "admin", "x", expected=e),
            )
            (won,), (lost,) = ([one for one in done if isinstance(one, kind)] for kind in (AliasPattern, Problem))
            # An administrator's is not a manager's to change, whatever they saw.
            assert isinstance(lost, Conflict) or (isinstance(lost, NotPermitted) and won.movers == "admin")
            if isinstance(lost, Conflict):
                said = lost.members
                assert (said["movers"], said["version"], said["changed_by"]) == (
                    won.movers,
                    str(won.generation),
                    won.set_by,
                )
            assert next(one for one in manager.patterns() if one.pattern == pattern) == won
            if won.movers == "admin":
                admin.protect_pattern(pattern, "manager", "back", expected="admin")
        seen = next(one for one in manager.patterns() if one.pattern == pattern)
        done = together(
            lambda p=pattern, g=seen.generation: manager.remove_pattern(p, "x", if_match=str(g)),
            lambda p=pattern, g=seen.generation: admin.protect_pattern(p, "engineer", "x", if_match=str(g)),
        )
        assert [type(one).__name__ for one in done] in (["AliasPattern", "StaleEdit"], ["StaleEdit", "AliasPattern"])
        (lost,) = (one for one in done if isinstance(one, StaleEdit))
        assert lost.members["changed_by"] == ("manager" if done[1] is lost else "admin")


@pytest.mark.parametrize("change", ["DELETE FROM alias_patterns", "UPDATE alias_patterns SET movers = 'engineer'"])
def test_a_pattern_that_is_not_as_its_log_says_is_a_fault(api, clients, change):
    clients["admin"].aliases.protect_pattern("prod-*", "admin", "x")
    with api.service.database.transaction() as session:
        session.execute(text(change))
    with api.service.database.transaction() as session:
        (fault,) = verification.verify(session, api.project_id).faults
    assert fault.problem == "the pattern prod-* is not as its log says"


def test_the_command_sets_shows_and_removes_patterns_and_says_who_may(api, command, clients, author):
    digest = held(api.service, author, "a").digest
    command.be("manager", api)
    assert "managers" in command.ok("alias", "protect", "@prod-*", "--reason", "what production reads").out
    shown = command.ok("alias", "protect", "v*", "--movers", "engineer", "--reason", "x", "--json").json
    assert (shown["pattern"], shown["movers"]) == ("v*", "engineer")
    listed = command.ok("alias", "patterns").out
    assert "@prod-*" in listed
    assert "engineers" in listed
    assert [one["pattern"] for one in command.ok("alias", "patterns", "--json").json["items"]] == ["prod-*", "v*"]
    command.ok("alias", "set", "prod-eu", digest[7:19], "--reason", "x")
    assert "managers, by the pattern prod-*" in command.ok("alias", "show", "prod-eu").out
    assert command("alias", "protect", "prod-*", "--movers", "admin", "--reason", "x").status == 4
    assert command("alias", "protect", "prod-eu", "--movers", "engineer", "--reason", "x").status == 2
    for wrong in (("prod-eu",), ("v*", "--off")):
        assert command("alias", "protect", *wrong, "--expect", "manager", "--reason", "x").status == 2
    change = ("alias", "protect", "v*", "--movers", "manager", "--reason", "x")
    stale = command(*change)
    assert (stale.status, "was expected to be new; look again, and say" in stale.err) == (4, True)
    assert command(*change, "--if-match", "1").status == 4
    assert "managers" in command.ok(*change, "--expect", "engineer").out
    assert "3" in command.ok("alias", "patterns").out.splitlines()[-1].split()
    assert command("alias", "protect", "Prod-*", "--reason", "x").status == 2
    command.be("engineer", api)
    refused = command("alias", "delete", "prod-eu", "--reason", "x")
    assert (refused.status, "by the pattern prod-*" in refused.err) == (4, True)
    command.be("manager", api)
    assert "nothing any more" in command.ok("alias", "protect", "prod-*", "--off", "--reason", "x").out
    assert [one.pattern for one in clients["viewer"].aliases.patterns()] == ["v*"]


def test_a_pattern_that_is_no_pattern_is_refused_before_it_is_sent(clients):
    with pytest.raises((ValueError, InvalidDocument)):
        clients["manager"].aliases.protect_pattern("prod", "manager", "x")
