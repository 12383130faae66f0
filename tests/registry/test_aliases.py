"""Aliases: moved by compare-and-swap, with their whole history; protected ones by managers; resolved once."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from registry import verification
from registry.client import Client
from schemas.alias import Alias
from schemas.api import TokenCreate
from schemas.evidence import Kind
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    InvalidDocument,
    NotFound,
    NotPermitted,
    Problem,
    StaleEdit,
)
from tests.support.api import one_by_one
from tests.support.factories import created_target, registered_policy
from tests.support.holdings import held
from tests.support.together import together


@pytest.fixture
def author(api):
    return api.actor("engineer")


def test_an_alias_is_made_moved_from_where_it_was_seen_and_taken_away_and_its_history_stays(
    api, clients, author, sound
):
    a, b = (held(api.service, author, name).digest for name in "ab")
    ci, engineer = clients["ci"].aliases, clients["engineer"].aliases
    made = ci.set("champion", a, "the first")
    assert (made.bundle, made.bundle_name, made.generation, made.changed_by) == (a, "a", 1, "ci")
    assert ci.set("champion", a, "again") == made
    for stale in ({}, {"expected": b}):
        with pytest.raises(Conflict) as refused:
            engineer.set("champion", b, "x", **stale)
        told = refused.value.members
        assert (told["bundle"], told["version"], told["changed_by"]) == (a, "1", "ci")
    moved = engineer.set("champion", b, "better", expected=a)
    with pytest.raises(StaleEdit):
        engineer.set("champion", a, "x", if_match="1")
    back = engineer.set("champion", a, "worse after all", if_match=str(moved.generation))
    assert (moved.generation, back.generation, ci.get("champion")) == (2, 3, back)
    ci.set("latest", b, "build 17")
    assert [(one.name, one.bundle) for one in ci.list()] == [("latest", b), ("champion", a)]
    assert [one.name for one in ci.list(bundle=a)] == ["champion"]
    with pytest.raises(StaleEdit):
        ci.delete("champion", "x", if_match="1")
    gone = ci.delete("champion", "not used", if_match="3")
    assert (gone.bundle, gone.generation) == (None, 4)
    for look in (ci.get, lambda name: ci.delete(name, "x"), clients["manager"].bundles.named):
        with pytest.raises(NotFound):
            look("champion")
    assert [one.name for one in ci.list()] == ["latest"]
    log = list(ci.history("champion"))
    assert [(one.kind, one.bundle, one.generation, one.by) for one in log] == [
        ("alias_deleted", None, 4, "ci"),
        ("alias_set", a, 3, "engineer"),
        ("alias_set", b, 2, "engineer"),
        ("alias_set", a, 1, "ci"),
    ]
    paged = one_by_one(api.clients["ci"], "/v1/aliases/champion/history")
    assert [one["generation"] for one in paged] == [4, 3, 2, 1]
    other = api.clients["ci"].get("/v1/aliases/latest/history", params={"cursor": "_" * 21 + "w"})
    assert other.status_code == 404
    at = [one.at for one in reversed(log)]
    assert [ci.at("champion", one).bundle for one in at] == [a, b, a, None]
    assert ci.at("champion", at[0] - timedelta(microseconds=1)).change is None
    with pytest.raises(InvalidDocument, match="yet to come"):
        ci.at("champion", at[0] + timedelta(days=1))
    beyond = api.clients["ci"].get("/v1/aliases/champion/named", params={"at": "9999-12-31T23:59:59-12:00"})
    assert beyond.status_code == 422
    assert "from 1970 to 2200" in beyond.json()["detail"]
    assert ci.set("champion", b, "once more").generation == 5


def test_what_has_no_bundle_or_no_name_leaves_nothing(api, clients, author, sound):
    with pytest.raises(NotFound):
        clients["ci"].aliases.set("champion", "sha256:" + "f" * 64, "x")
    with pytest.raises(NotFound):
        clients["ci"].aliases.history("champion").__next__()
    digest = held(api.service, author, "a").digest
    for name in ("Champion", "a_b", "-a", "a" * 64):
        answer = api.clients["ci"].put(f"/v1/aliases/{name}", json={"bundle": digest, "reason": "x"})
        assert answer.status_code == 422
    assert list(clients["ci"].aliases.list()) == []


def test_only_managers_of_the_whole_project_move_a_protected_alias(api, clients, author, sound):
    a, b = (held(api.service, author, name).digest for name in "ab")
    clients["ci"].aliases.set("prod", a, "the first")
    for role in ("ci", "engineer", "viewer"):
        with pytest.raises(NotPermitted):
            clients[role].aliases.protect("prod", "x")
    shown = clients["manager"].aliases.protect("prod", "production reads it", if_match="1")
    assert (shown.is_protected, shown.bundle, shown.generation) == (True, a, 2)
    assert clients["manager"].aliases.protect("prod", "again") == shown
    limited = TokenCreate(name="kim", role="manager", targets=["chat@prod"])
    with Client(api.url, clients["admin"].tokens.create(limited).secret) as kim:
        for client in (kim, clients["ci"], clients["engineer"], clients["viewer"]):
            with pytest.raises(NotPermitted):
                client.aliases.set("prod", b, "x", expected=a)
            with pytest.raises(NotPermitted):
                client.aliases.delete("prod", "x")
        kim.aliases.set("mine", a, "any name that nobody protects")
    clients["manager"].aliases.set("prod", b, "accepted", expected=a)
    clients["admin"].aliases.delete("prod", "renamed")
    # Its name is protected as before: nobody makes it anew who could not move it.
    with pytest.raises(NotPermitted):
        clients["ci"].aliases.set("prod", a, "x")
    clients["manager"].aliases.set("prod", a, "back")
    clients["manager"].aliases.protect("prod", "a playground", is_protected=False)
    assert clients["ci"].aliases.set("prod", b, "x", expected=a).bundle == b


def test_a_protected_alias_takes_no_quarantined_bundle(api, clients, author, sound):
    a, bad = (held(api.service, author, name).digest for name in ("a", "bad"))
    manager = clients["manager"]
    manager.aliases.set("prod", a, "the first")
    manager.aliases.protect("prod", "production reads it")
    manager.aliases.set("trial", bad, "to be looked at")
    manager.bundles.quarantine(bad, "withdrawn")
    assert manager.aliases.get("trial").is_quarantined
    with pytest.raises(BundleQuarantined, match="withdrawn"):
        manager.aliases.set("prod", bad, "x", expected=a)
    with pytest.raises(BundleQuarantined):
        manager.aliases.protect("trial", "x")
    assert manager.aliases.set("suspect", bad, "a name for the report").is_quarantined
    manager.bundles.lift(bad, "sound")
    assert manager.aliases.set("prod", bad, "sound", expected=a).bundle == bad


def test_a_bundle_that_an_alias_names_is_not_deleted_and_of_two_at_once_one_is_first(api, clients, author, sound):
    manager = clients["manager"]
    bundle = held(api.service, author, "a").digest
    manager.aliases.set("champion", bundle, "x")
    with pytest.raises(Conflict, match="the alias @champion names it") as refused:
        manager.bundles.delete(bundle, "x")
    assert refused.value.members["holder"] == "@champion"
    manager.aliases.delete("champion", "x")
    manager.bundles.delete(bundle, "x")
    for round_ in range(4):
        other = held(api.service, author, f"b{round_}").digest
        acts = [
            lambda o=other, r=round_: clients["ci"].aliases.set(f"a{r}", o, "x"),
            lambda o=other: manager.bundles.delete(o, "x"),
        ]
        named, deleted = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert isinstance(named, Problem) is not isinstance(deleted, Problem), (named, deleted)
        assert isinstance(named, Alias | NotFound)


def test_of_two_who_move_an_alias_at_once_one_does_and_the_other_is_told_where_it_is(api, clients, author, sound):
    digests = [held(api.service, author, name).digest for name in "abc"]
    ci, engineer = clients["ci"].aliases, clients["engineer"].aliases
    for round_ in range(4):
        name = f"n{round_}"
        for expected in (None, digests[0]):
            if expected is not None:
                holder = ci.get(name).bundle
                ci.set(name, expected, "the next race", expected=holder)
            moved = together(
                lambda n=name, e=expected: ci.set(n, digests[1], "x", expected=e),
                lambda n=name, e=expected: engineer.set(n, digests[2], "x", expected=e),
            )
            assert sorted(type(one).__name__ for one in moved) == ["Alias", "Conflict"], moved
            (won,), (lost,) = ([one for one in moved if isinstance(one, kind)] for kind in (Alias, Conflict))
            assert (lost.members["bundle"], lost.members["version"]) == (won.bundle, str(won.generation))
            assert ci.get(name) == won


def test_what_an_alias_is_cached_as_otherwise_than_its_log_says_is_a_fault(api, clients, author):
    a, b = (held(api.service, author, name).digest for name in "ab")
    clients["ci"].aliases.set("champion", a, "x")
    with api.service.database.transaction() as session:
        session.execute(text("UPDATE aliases SET bundle = :bundle"), {"bundle": b})
    with api.service.database.transaction() as session:
        (fault,) = verification.verify(session, author.project_id).faults
    assert fault.problem == "the alias is not as its log says"


def test_the_command_takes_an_alias_where_it_takes_a_bundle_and_records_the_digest(api, command, clients, author):
    a, b = (held(api.service, author, name).digest for name in "ab")
    created_target(api.service, author)
    policy = registered_policy(api.service, author).digest
    command.be("engineer", api)
    assert "@champion" in command.ok("alias", "set", "@champion", a[7:19], "--reason", "the first").out
    stale = command("alias", "set", "champion", b[7:19], "--reason", "better")
    assert (stale.status, a in stale.err) == (4, True)
    command.ok("alias", "set", "champion", b[7:19], "--expect", "@champion", "--reason", "better")
    assert command.ok("alias", "show", "champion", "--json").json["bundle"] == b
    first = command.ok("alias", "history", "champion", "--json").json["items"][-1]
    assert command.ok("alias", "show", "champion", "--at", first["at"], "--json").json["bundle"] == a
    for line in (("show", "champion"), ("show", "champion", "--at", first["at"]), ("history", "champion"), ("list",)):
        assert b[7:19] in command.ok("alias", *line).out or a[7:19] in command.ok("alias", *line).out
    assert [one["name"] for one in command.ok("alias", "list", "--bundle", "@champion", "--json").json["items"]] == [
        "champion"
    ]
    shown = command.ok("bundle", "show", "@champion", "--json").json
    assert (shown["digest"], shown["aliases"]) == (b, ["champion"])
    command.ok("alias", "set", "best", b[7:19], "--reason", "a second name")
    assert "@best @champion" in command.ok("bundle", "show", b[7:19]).out
    assert clients["viewer"].bundles.get(a).aliases == []
    new = ("release", "create", "--target", "chat@prod", "--bundle", "@champion", "--policy", policy, "--json")
    release = command.ok(*new).json
    assert release["bundle"] == b
    command.ok("alias", "set", "champion", a[7:19], "--expect", "@champion", "--reason", "back")
    shown = command.ok("release", "show", release["id"], "--json").json
    assert (shown["bundle"], "champion" in str(shown["log"])) == (b, False)
    assert command("bundle", "show", "@nobody").status == 2
    assert command("bundle", "show", "@Not.A.Name!").status == 2
    assert command("alias", "protect", "champion", "--reason", "x").status == 4
    command.be("manager", api)
    assert "managers" in command.ok("alias", "protect", "champion", "--reason", "production reads it").out
    assert command.ok("alias", "protect", "champion", "--off", "--reason", "x", "--json").json["is_protected"] is False
    assert "deleted: @champion" in command.ok("alias", "delete", "champion", "--reason", "not used").out
    assert command("alias", "set", "champion", a[7:19], "--reason", "").status == 2
    kinds = {entry.kind for entry in clients["viewer"].evidence.list()}
    assert {Kind.ALIAS_SET, Kind.ALIAS_PROTECTED, Kind.ALIAS_DELETED} <= kinds
