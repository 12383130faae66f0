import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import text

from gates.plain import NO_AUTHORITY
from registry import releases
from registry.auth import Actor
from registry.service import Service
from registry.web.chart import split_over_time, weights_over_time
from registry.web.colours import colours
from registry.web.rendering import percent
from schemas.api import Act
from schemas.evidence import BODIES, Entry, Kind, SplitEntry
from schemas.release import Phase
from schemas.short import many
from schemas.stories import STORIES, tell
from tests.support.api import Api
from tests.support.streams import Script, stream_engine
from tests.support.world import World, world

START = datetime(2026, 3, 3, 14, 3, tzinfo=UTC)


def entry(kind: Kind, body: dict[str, object], seconds: float) -> Entry:
    return Entry(
        sequence=1,
        id=uuid4(),
        project=uuid4(),
        stream="release/x",
        position=1,
        act="x",
        kind=kind,
        actor="maria",
        recorded_at=START + timedelta(seconds=seconds),
        body=body,
        previous="",
        entry_digest="sha256:" + "0" * 64,
        key_id="k",
        envelope=None,
    )


def shifted(weight_bp: int, seconds: float) -> Entry:
    return entry(Kind.TRAFFIC_SHIFTED, {"desired": [{"bundle": "b", "weight_bp": weight_bp}]}, seconds)


def test_the_chart_is_a_step_line_that_ends_where_traffic_went_back() -> None:
    log = [entry(Kind.CREATED, {}, 0), shifted(1000, 10), shifted(5000, 20), entry(Kind.TRAFFIC_RESTORED, {}, 30)]
    chart = split_over_time(log, now=START + timedelta(seconds=500), is_over=True)
    assert chart is not None
    assert chart.line.count("V") == 3
    assert chart.line.endswith(f"H{float(chart.right)}")
    levels = {label: y for y, label in chart.levels}
    assert f"V{levels['50 %']}" in chart.line
    assert f"V{levels['0 %']}" in chart.line


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.5, ["+0.2 s", "+0.4 s", "+0.6 s", "+0.8 s", "+1 s"]),
        (27, ["+5 s", "+10 s", "+15 s", "+20 s", "+25 s"]),
        (109, ["+20 s", "+40 s", "+60 s", "+80 s", "+100 s"]),
        (300, ["+1 min", "+2 min", "+3 min", "+4 min", "+5 min"]),
        (9000, ["+30 min", "+60 min", "+90 min", "+120 min", "+150 min"]),
        (86400 * 3, ["+1 d", "+2 d", "+3 d"]),
        (86400 * 500, ["+84 d", "+168 d", "+252 d", "+336 d", "+420 d"]),
    ],
)
def test_the_time_axis_is_labelled_in_round_steps(seconds: float, labels: list[str]) -> None:
    log = [entry(Kind.CREATED, {}, 0), shifted(1000, seconds)]
    chart = split_over_time(log, now=START, is_over=True)
    assert chart is not None
    assert [tick.label for tick in chart.ticks] == ["14:03:00 UTC", *labels]
    places = [tick.x for tick in chart.ticks]
    assert places == sorted(places)
    assert places[-1] <= chart.right


def test_there_is_no_chart_before_traffic_has_moved() -> None:
    assert split_over_time([entry(Kind.CREATED, {}, 0)], now=START, is_over=False) is None


def test_one_file_is_no_files() -> None:
    assert [many(count, "file") for count in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [many(count, "policy") for count in (1, 2)] == ["1 policy", "2 policies"]


def split(*names: str) -> list[SplitEntry]:
    return [SplitEntry(bundle="sha256:" + name * 64, weight_bp=10_000 // len(names)) for name in names]


def test_a_bundle_keeps_its_colour_in_whatever_place_of_a_split_it_stands() -> None:
    assert list(colours([split("a"), split("a", "b"), [], split("b"), split("b", "c")]).values()) == [0, 1, 2]
    following = [split("a"), *(split("a", one) for one in "bcdef0123")]
    found = colours(following)
    assert len(found) == 10
    for one in following:
        assert len({found[arm.bundle] for arm in one}) == len(one), "the one that is live shares with none beside it"


def test_traffic_over_time_is_stacked_by_bundle_and_a_short_step_is_still_seen() -> None:
    first, second = (SplitEntry(bundle=f"sha256:{digit * 64}", weight_bp=10_000) for digit in "ab")
    part, rest = (one.model_copy(update={"weight_bp": weight}) for one, weight in ((first, 6000), (second, 4000)))
    times = [START + timedelta(seconds=seconds) for seconds in (0, 86_000, 86_001)]
    spans = [(times[0], times[1], [first]), (times[1], times[2], [part, rest]), (times[2], None, [second])]
    drawn = weights_over_time(spans, now=START + timedelta(days=1))
    assert drawn is not None
    whole, lower, upper, last = drawn.bars
    assert [one.bundle for one in drawn.bars] == [first.bundle, first.bundle, second.bundle, second.bundle]
    assert (lower.x, lower.width) == (upper.x, upper.width)
    assert lower.width == 1.5
    assert (round(lower.height + upper.height, 1), upper.y) == (whole.height, whole.y)
    assert round(upper.y + upper.height, 1) == lower.y
    assert round(last.x + last.width) == drawn.right
    # Where nobody serves nothing is drawn, and no traffic at all is no chart.
    assert weights_over_time([(START, None, [])], now=START) is None
    assert weights_over_time([], now=START) is None


def test_what_never_had_a_weight_has_a_dash() -> None:
    assert [percent(weight) for weight in (None, 0, 250)] == ["—", "0 %", "2.5 %"]


def test_every_kind_of_entry_has_a_story() -> None:
    assert set(STORIES) | {Kind.GATE_RECORDED} == set(BODIES)
    assert tell(entry(Kind.HELD, {"reasons": ["no traffic"]}, 0)) == ("warn", "no traffic")


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def rolled_back(here: World) -> UUID:
    """Release a good bundle, then one that live traffic shows to be slow."""
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("slow", Script(ttft_ms=600)) as slow:
        here.live(here.bundle("gemma-chat", b"1" * 10), policy, one)
        second = here.release(here.bundle("gemma-chat", b"2" * 10), policy, "<script>alert(1)</script>")
        here.evaluate()
        here.serve(slow, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.ROLLED_BACK)
            here.until(lambda: any(e.kind is Kind.RESTORE_OBSERVED for e in here.show(second).log))
    return second


def log_in(api: Api, client: httpx.Client, onward: str) -> httpx.Response:
    return client.post("/login", data={"token": api.tokens["engineer"], "next": onward})


def test_a_person_logs_in_and_sees_why_a_release_went_back(here: World) -> None:
    release = rolled_back(here)
    address = f"/releases/{release}"
    with (
        Api(here.service) as api,
        httpx.Client(base_url=api.url, follow_redirects=False, verify=NO_AUTHORITY) as browser,
    ):
        sent = browser.get(address)
        assert (sent.status_code, sent.headers["location"]) == (303, f"/login?next={address}")
        wrong = browser.post("/login", data={"token": "slg_wrong", "next": address})
        assert wrong.status_code == 401
        assert "not known" in wrong.text
        assert "<form" in wrong.text
        welcome = log_in(api, browser, address)
        assert (welcome.status_code, welcome.headers["location"]) == (303, address)
        assert "HttpOnly" in welcome.headers["set-cookie"]
        page = browser.get(address)
        assert page.status_code == 200
        for expected in ("rolled back", "ttft above 300 ms", "restore observed", "<svg", "compatibility"):
            assert expected in page.text
        assert "<script>alert" not in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]
        # It has ended: nothing on it changes any more.
        assert "data-events" not in page.text
        assert browser.get(f"/releases/{uuid4()}").status_code == 404
        for path in ("/static/sluicegate.css", "/static/live.js", "/static/mark.svg"):
            assert browser.get(path).status_code == 200
        target = browser.get("/targets/chat@prod").text
        for expected in ("ttft above 300 ms", "50 %", "100 %", "now", "<h2>Live</h2>", "127.0.0.1<wbr>:"):
            assert expected in target
        # Each bundle has one colour on the whole page, and no other bundle has it.
        coloured = set(re.findall(r'class="key arm(\d)".*?href="/bundles/([^"]+)"', target))
        assert len(coloured) == len({colour for colour, _ in coloured}) == len({bundle for _, bundle in coloured}) == 2


@pytest.mark.parametrize("onward", ["//elsewhere.test/", "https://elsewhere.test/", "/\\elsewhere.test"])
def test_a_login_never_sends_its_visitor_elsewhere(api: Api, onward: str) -> None:
    with httpx.Client(base_url=api.url, verify=NO_AUTHORITY) as browser:
        assert log_in(api, browser, onward).headers["location"] == "/"


@pytest.mark.parametrize(
    ("asked", "leads_to"), [("/releases", "/"), ("/releases?target=chat@prod", "/?target=chat@prod")]
)
def test_the_list_of_releases_is_found_under_its_name_as_each_other_list_is(
    api: Api, asked: str, leads_to: str
) -> None:
    answer = httpx.get(f"{api.url}{asked}")
    assert (answer.status_code, answer.headers["location"]) == (303, leads_to)


def test_a_runner_s_token_opens_no_page_and_a_login_that_waits_keeps_nobody_waiting(api: Api) -> None:
    answers: list[httpx.Response] = []

    def log_in_as_a_runner() -> None:
        with httpx.Client(base_url=api.url, verify=NO_AUTHORITY, timeout=60) as browser:
            answers.append(browser.post("/login", data={"token": api.tokens["runner"], "next": "/"}))

    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    other = threading.Thread(target=log_in_as_a_runner)
    with api.service.database.transaction() as session, api.service.database.look() as connection:
        session.execute(text("LOCK TABLE tokens IN ACCESS EXCLUSIVE MODE"))
        other.start()
        while not connection.scalar(waiting):
            assert other.is_alive()
        with api.client(None) as client:
            assert client.get("/healthz", timeout=5).status_code == 200
        assert answers == []
    other.join()
    assert [answer.status_code for answer in answers] == [401]


def test_a_page_of_a_release_under_way_says_what_it_waits_for(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy(approval={"required": 1}))
    here.evaluate()
    here.until_phase(release, Phase.GATED)
    with here.service.database.transaction() as session:
        releases.pause(session, here.service, here.actor, release, Act(reason="freeze until Monday"))
    with (
        Api(here.service) as api,
        httpx.Client(base_url=api.url, follow_redirects=True, verify=NO_AUTHORITY) as browser,
    ):
        log_in(api, browser, "/")
        page = browser.get(f"/releases/{release}").text
    assert "gated" in page
    assert "paused" in page
    assert "freeze until Monday" in page
    assert "No traffic yet" in page
