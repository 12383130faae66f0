"""The pages over HTTP: what each says, what it leaves out, how it goes on, and what a visitor's words become."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text

from gates.plain import NO_AUTHORITY
from registry import alias_patterns, aliases, db, quarantine, releases, runners
from registry.auth import Actor
from registry.service import Service
from registry.web import inventory
from registry.web import releases as release_pages
from registry.web.rendering import ago, amount
from schemas.alias import AliasPatternSet, AliasSet
from schemas.api import Act, ReleaseCreate
from schemas.evidence import Kind, Reasoned, Traffic
from schemas.runner import RunnerRegistration
from tests.support.api import Api
from tests.support.factories import (
    created_target,
    record_act,
    registered_bundle,
    registered_policy,
    started_release,
)
from tests.support.holdings import held, live

EVIL = "<img src=x onerror=alert(1)>'\""
FINGERPRINT = {
    "cpu": "AMD EPYC 9654",
    "cpu_flags": "avx2 avx512f",
    "cores": 192,
    "memory_bytes": 1_584_563_273_728,
    "accelerators": [{"sku": "NVIDIA H100", "memory_bytes": 85_520_809_984}] * 4,
    "driver": "550.54",
    "cuda": "12.4",
    "kernel": "6.8.0",
}


@pytest.fixture
def visit(committed: Service) -> Iterator[httpx.Client]:
    """A browser that has logged in as an engineer."""
    with Api(committed) as api, api.visitor("engineer") as client:
        client.headers["x-token"] = api.tokens["runner"]
        yield client


def many_releases(service: Service, actor: Actor, count: int, target: str = "chat@prod") -> list[UUID]:
    """Releases of one bundle, each rejected before the next, the oldest first."""
    created_target(service, actor, target)
    bundle, policy = registered_bundle(service, actor), registered_policy(service, actor)
    made = []
    for _ in range(count):
        with service.database.transaction() as session:
            body = ReleaseCreate(target=target, bundle=bundle.digest, policy=policy.digest)
            made.append(releases.create(session, service, actor, body).id)
        with service.database.transaction() as session:
            releases.reject(session, service, actor, made[-1], Act(reason="no"))
    return made


def linked(page: str, prefix: str = "/releases/") -> list[str]:
    return re.findall(rf'href="{prefix}([^"?]+)"', page)


def older(page: str) -> str | None:
    found = re.search(r'<a href="([^"]+)" rel="next">', page)
    return found[1].replace("&amp;", "&") if found else None


def walk(visit: httpx.Client, address: str) -> list[str]:
    seen = []
    following: str | None = address
    while following is not None:
        page = visit.get(following).text
        seen += linked(page)
        following = older(page)
    return seen


def test_nothing_is_shown_to_who_has_not_logged_in(committed, actor):
    release = started_release(committed, actor)
    with Api(committed) as api, httpx.Client(base_url=api.url, trust_env=False, verify=NO_AUTHORITY) as stranger:
        for path in (
            "/",
            f"/releases/{release}",
            "/bundles",
            "/targets",
            "/targets/chat@prod",
            "/policies/" + "0" * 64,
            "/runners",
            f"/runners/{release}",
            "/events",
        ):
            for cookie in ({}, {"sluicegate_session": "slg_wrong"}, {"sluicegate_session": api.tokens["runner"]}):
                headers = {"cookie": "; ".join(f"{name}={value}" for name, value in cookie.items())}
                sent = stranger.get(path, headers=headers)
                assert (sent.status_code, sent.headers["location"]) == (303, f"/login?next={path}"), path
                assert "chat" not in sent.text


def test_releases_are_listed_filtered_and_paged_newest_first(committed, actor, visit, monkeypatch):
    monkeypatch.setattr(release_pages, "PAGE_SIZE", 2)
    made = [str(one) for one in reversed(many_releases(committed, actor, 5))]
    other = str(started_release(committed, actor, "other@prod", name="other"))
    assert walk(visit, "/") == [other, *made]
    assert walk(visit, "/?target=chat@prod") == made
    assert walk(visit, "/?target=&phase=candidate") == [other]
    assert walk(visit, "/?target=other@prod&phase=rejected") == []
    page = visit.get("/?target=chat@prod&phase=rejected").text
    assert '<option value="chat@prod" selected>' in page
    assert "target=chat%40prod&amp;phase=rejected" in page
    assert "No release matches" in visit.get("/?phase=canary").text
    for wrong in ("/?phase=lost", "/?target=nowhere@prod", "/?target=%00", "/?cursor=x", "/?target=<b>"):
        answer = visit.get(wrong)
        assert answer.status_code in (404, 422)
        assert "text/html" in answer.headers["content-type"]


def test_a_bundle_s_page_has_everything_that_decides_what_is_served(committed, actor, visit, monkeypatch):
    monkeypatch.setattr(inventory, "PAGE_SIZE", 2)
    many = [str(one) for one in reversed(many_releases(committed, actor, 3))]
    bundle = registered_bundle(committed, actor)
    page = visit.get(f"/bundles/{bundle.digest}").text
    for expected in (
        bundle.digest,
        bundle.serving_digest,
        *bundle.components().values(),
        "model.gguf",
        "llamacpp test",
        "context tokens",
        "Apache-2.0",
        bundle.files[0].sha256[7:19],
    ):
        assert expected in page
    assert walk(visit, f"/bundles/{bundle.digest}") == many
    assert visit.get(f"/bundles/{bundle.digest[7:17]}").status_code == 200
    labelled = registered_bundle(committed, actor, "labelled", labels={"team": "search"})
    assert "team=search" in visit.get(f"/bundles/{labelled.digest}").text
    assert linked(visit.get("/bundles").text, "/bundles/") == [labelled.digest, bundle.digest]
    assert visit.get("/bundles/sha256:" + "0" * 64).status_code == 404
    assert visit.get("/bundles/zzz").status_code == 404


def test_a_release_leads_to_its_policy_which_says_what_it_asks_for(committed, actor, visit):
    release = started_release(committed, actor)
    (digest,) = linked(visit.get(f"/releases/{release}").text, "/policies/")
    page = visit.get(f"/policies/{digest}").text
    policy = registered_policy(committed, actor)
    assert policy.digest == digest
    assert policy.description in page
    assert digest in page
    for rule in policy.gates:
        assert f"<b>{rule.gate}</b>" in page
    for step in policy.canary.steps:
        assert f'data-label="Traffic" class="number">{step.weight_bp / 100:g} %<' in page
    assert page.count('data-label="Step"') == len(policy.canary.steps)
    said = "error ratio above " + str(
        next(one.max_ratio for one in policy.canary.stop_conditions if one.metric == "error_ratio")
    )
    assert said in page
    assert visit.get(f"/policies/{digest[7:17]}").text == page
    for wrong in ("sha256:" + "0" * 64, "zzz", registered_bundle(committed, actor).digest):
        assert visit.get(f"/policies/{wrong}").status_code == 404


def moved(service: Service, release: UUID, kind: Kind, weights: dict[str, int], at, act: str, **more) -> None:
    split = [{"bundle": bundle, "weight_bp": weight} for bundle, weight in weights.items()]
    times = {"requested_at": at, "applied_at": at}
    body = Traffic.model_validate({"desired": split, "revision": "1", "applied_ms": 1.0, **times, **more})
    record_act(service, release, kind, body, act)


def test_a_target_s_page_says_who_served_when(committed, actor, visit, monkeypatch):
    monkeypatch.setattr(inventory, "PAGE_SIZE", 2)
    release = started_release(committed, actor)
    bundle = registered_bundle(committed, actor).digest
    with committed.database.transaction() as session:
        start = db.now(session).replace(microsecond=0)
        session.execute(text("UPDATE releases SET phase = 'approved'"))
    times = [start + timedelta(minutes=minute) for minute in range(3)]
    times.append(times[2] + timedelta(milliseconds=400))
    for number, weight in enumerate((1000, 5000, 10_000, 10_000)):
        moved(
            committed,
            release,
            Kind.TRAFFIC_SHIFTED,
            {bundle: weight},
            times[min(number, 2)],
            f"shift:{number}",
            step=number,
        )
    why = {"cause": "stop_condition", "reasons": [f"too slow {EVIL}"]}
    moved(committed, release, Kind.TRAFFIC_RESTORED, {}, times[3], "back", **why)

    first = visit.get("/targets/chat@prod").text
    second = visit.get(older(first) or "").text
    rows = [
        re.findall(r"data-label=\"(?:From|Until) \(UTC\)\">(.*?)</td>", page, re.DOTALL) for page in (first, second)
    ]
    shown = [[re.sub("<.*?>", "", cell).strip() for cell in cells] for cells in rows]
    clock = [f"{at:%Y-%m-%d %H:%M:%S}" for at in times]
    assert shown == [[clock[3], "now", clock[2], f"{clock[3]} after 400 ms"], [clock[1], clock[2], clock[0], clock[1]]]
    assert older(second) is None
    assert "no traffic (503)" in first
    assert "too slow &lt;img src=x onerror=alert(1)&gt;&#39;&#34;" in first
    assert "10 %" in second
    assert "Each bundle's share of traffic over time" in second
    by = re.findall(r'data-label="By">(\w+) .*?href="/releases/([^"]+)"', first)
    assert by == [("test", str(release))] * 2
    assert "Nothing is live." in first
    assert EVIL not in first


def test_targets_and_runners_are_listed_with_what_they_are_and_do(committed, actor, visit):
    release = started_release(committed, actor)
    registration = {"name": "node-17", "runner_class": "cpu", "engines": ["llamacpp"], "boot_id": "b"}
    with committed.database.transaction() as session:
        said = RunnerRegistration.model_validate({**registration, "fingerprint": FINGERPRINT})
        runner = runners.register(session, actor.project_id, said).id
        session.execute(
            text(
                'INSERT INTO jobs (id, project_id, kind, release_id, bundle, suites, "references", gates, runner_class,'
                " runner_id, state, is_wanted, attempt, due_at, fencing_token, created_at, created_by, progress)"
                " SELECT gen_random_uuid(), project_id, 'evaluate', id, bundle, '[]', '{}', '[]', 'cpu', :runner,"
                " 'claimed', true, 1, now(), 1, now(), 'x', :progress FROM releases"
            ),
            {"runner": runner, "progress": f"gate load {EVIL}"},
        )
    page = visit.get("/runners").text
    assert "runner class cpu" in page
    assert visit.get("/runners/node-17").text == visit.get(f"/runners/{runner}").text
    for expected in (
        "node-17",
        "alive",
        "AMD EPYC 9654, 192 cores",
        "1.58 TB",
        "4 × NVIDIA H100 (85.5 GB)",
        "CUDA 12.4",
    ):
        assert expected in page
    assert linked(page) == [str(release)]
    assert "gate load &lt;img" in page
    assert EVIL not in page
    with committed.database.transaction() as session:
        session.execute(text("UPDATE runners SET last_seen_at = now() - interval '31 seconds'"))
    assert "silent" in visit.get("/runners").text
    listed = visit.get("/targets").text
    assert linked(listed, "/targets/") == ["chat@prod"]
    assert linked(listed) == [str(release)]
    assert visit.get("/targets/nowhere@prod").status_code == 404
    assert visit.get("/targets/CHAT").status_code == 404


def test_another_project_s_things_are_not_there(committed, visit):
    with committed.database.transaction() as session:
        from registry import projects  # beside its use

        theirs, _ = projects.ensure(session, committed, "theirs", by="test")
        other = Actor(theirs.id, "theirs", "eve", "manager")
    release = started_release(committed, other, "secret@prod")
    bundle = registered_bundle(committed, other).digest
    for path in (f"/releases/{release}", f"/bundles/{bundle}", "/targets/secret@prod", "/?target=secret@prod"):
        assert visit.get(path).status_code == 404
    for path in ("/", "/bundles", "/targets", "/runners"):
        assert not linked(visit.get(path).text)
        assert "secret" not in visit.get(path).text


def test_what_people_write_is_text_on_every_page(committed, actor, visit):
    created_target(committed, actor)
    bundle = registered_bundle(
        committed,
        actor,
        description=EVIL,
        engine={
            "name": "llamacpp",
            "version": EVIL,
            "environment": "sha256:" + "e" * 64,
            "arguments": ["--x", EVIL],
        },
    )
    policy = registered_policy(committed, actor)
    with committed.database.transaction() as session:
        body = ReleaseCreate(target="chat@prod", bundle=bundle.digest, policy=policy.digest, reason=EVIL)
        release = releases.create(session, committed, actor, body).id
    record_act(committed, release, Kind.HELD, Reasoned(reasons=[EVIL], cause="x"))
    for path in (f"/releases/{release}", f"/bundles/{bundle.digest}"):
        page = visit.get(path).text
        assert EVIL not in page
        assert page.count("&lt;img src=x onerror=alert(1)&gt;&#39;&#34;") >= 2
        assert page.count("<img") == 1


def test_no_page_has_a_script_or_style_of_its_own(committed, actor, visit):
    release = started_release(committed, actor)
    bundle = registered_bundle(committed, actor).digest
    paths = (
        "/",
        f"/releases/{release}",
        f"/bundles/{bundle}",
        "/bundles",
        "/targets",
        "/targets/chat@prod",
        "/runners",
    )
    for path in (*paths, "/login", "/releases/x"):
        answer = visit.get(path)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|<script(?! src=\"/static/)", answer.text), path


def test_logging_out_forgets_the_token(visit):
    assert visit.get("/").status_code == 200
    out = visit.post("/logout")
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert visit.get("/").status_code == 303
    assert visit.get("/logout").status_code == 405


def test_pages_are_told_what_happens_by_cookie_alone(committed, actor, visit):
    release = started_release(committed, actor)
    source = re.search(r'data-events="([^"]+)"', visit.get(f"/releases/{release}").text)
    assert source is not None
    record_act(committed, release, Kind.HELD, Reasoned(reasons=["why"], cause="x"))
    with visit.stream("GET", source[1].replace("&amp;", "&")) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = ""
        for chunk in answer.iter_text():
            told += chunk
            if "data:" in told:
                break
    # From when the page was made: what is on it already is not told again.
    assert '"kind":"held"' in told
    assert '"kind":"created"' not in told
    assert visit.get("/events?after=x").status_code == 422


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123_456, "123 kB"), (2.5e9, "2.5 GB"), (3e15, "3e+03 TB")],
)
def test_bytes_are_said_in_a_unit_to_read(size, said):
    assert amount(size) == said


def test_times_are_said_in_their_largest_unit():
    from datetime import UTC, datetime  # beside its use

    now = datetime(2026, 3, 3, tzinfo=UTC)
    said = [ago(now - timedelta(seconds=seconds), now) for seconds in (-5, 0, 59, 60, 7200, 90_000)]
    assert said == ["0 s ago", "0 s ago", "59 s ago", "1 min ago", "2 h ago", "1 d ago"]


def test_a_quarantine_and_aliases_are_told_on_every_page_that_they_concern(committed, actor, visit):
    created_target(committed, actor)
    bundle, other = held(committed, actor, "a"), held(committed, actor, "b")
    live(committed, actor, bundle)
    with committed.database.transaction() as session:
        for name, named in (("champion", bundle), ("latest", other)):
            aliases.put(session, committed, actor, name, AliasSet(bundle=named.digest, reason="x"))
    for address in ("/bundles", "/aliases", "/targets", "/targets/chat@prod", f"/bundles/{bundle.digest}"):
        assert "quarantined" not in visit.get(address).text.lower()
    with committed.database.transaction() as session:
        quarantine.impose(session, committed, actor, bundle.digest, Act(reason=EVIL))
    for address in ("/bundles", "/aliases", "/targets"):
        assert visit.get(address).text.count('<span class="pill bad">quarantined</span>') == 1
    shown = visit.get("/targets/chat@prod").text
    assert ("and serves on." in shown, EVIL in shown) == (True, False)
    shown = visit.get(f"/bundles/{bundle.digest}").text
    assert ("nothing goes on with it." in shown, "<code>@champion</code>" in shown, "@latest" in shown) == (
        True,
        True,
        False,
    )
    listed = visit.get("/aliases").text
    assert ("@champion" in listed, "@latest" in listed, "Protected by their names" in listed) == (True, True, False)
    with committed.database.transaction() as session:
        said = AliasPatternSet(pattern="late*", movers="admin", reason=EVIL)
        alias_patterns.put(session, committed, replace(actor, role="admin"), said)
    listed = visit.get("/aliases").text
    assert (listed.count("administrators"), "@late*" in listed, EVIL in listed) == (2, True, False)
