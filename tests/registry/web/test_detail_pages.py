"""One bundle, one runner, one problem as pages: what each says, and the way on from it."""

import re
from collections.abc import Iterator

import httpx
import pytest

from gates.plain import NO_AUTHORITY
from registry.web.rendering import lasted
from schemas.problems import PROBLEMS
from schemas.result import Verdict
from tests.registry.web.test_pages import START
from tests.support.factories import registered_bundle
from tests.support.scene import Scene


@pytest.fixture
def visit(scene: Scene) -> Iterator[httpx.Client]:
    with scene.api.visitor("viewer") as client:
        yield client


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_a_bundle_s_page_has_what_gates_found_and_where_it_stands_in_its_family(scene, visit):
    address = f"/bundles/{scene.bundle.digest}"
    assert "No gate has run on it yet" in visit.get(address).text
    later = registered_bundle(scene.service, scene.api.actor("manager"), content=b"other weights", runtime={
        "context_tokens": 1024, "max_sequences": 4,
    })  # fmt: skip
    scene.target()
    release = scene.release()["id"]
    scene.command.ok("release", "reject", release, "-r", "only the gates")
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate(compatibility=Verdict.FAILED)

    page = visit.get(address).text
    said = text_of(page)
    for expected in (
        "compatibility failed compatibility said failed 1.5 s",
        "integrity passed integrity said passed",
        "in a run",
        "directory test",
        "differs in runtime, weights",
    ):
        assert expected in said
    assert f'href="/bundles/{later.digest}"' in page
    assert f'href="/releases/{release}"' in page
    assert "data-events=" in page
    after = visit.get(f"/bundles/{later.digest}").text
    assert "before it" in after
    assert f'href="/bundles/{scene.bundle.digest}"' in after


def test_a_runner_s_page_has_its_machine_and_what_it_did(scene, visit):
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    listed = visit.get("/runners").text
    address = f"/runners/{scene.runner_id}"
    assert f'href="{address}"' in listed
    assert "It has had none yet" in visit.get(address).text
    scene.evaluate()
    page = visit.get(address).text
    said = text_of(page)
    for expected in ("runner-1", "runner class cpu", "Test CPU, 4 cores", "evaluate a run", "done"):
        assert expected in said
    assert f'href="/bundles/{scene.bundle.digest}"' in page
    assert "data-events=" in page
    for wrong in ("/runners/00000000-0000-7000-8000-000000000000", "/runners/nobody"):
        missing = visit.get(wrong)
        assert missing.status_code == 404
        assert 'href="/targets"' in missing.text, "whoever is lost finds the way on"


@pytest.mark.parametrize("kind", ["policy-too-weak", "unauthenticated"])
def test_the_page_of_a_problem_leads_on(scene, visit, kind):
    page = visit.get(f"/problems/{kind}").text
    assert 'href="/targets"' in page
    assert "Log out" in page
    assert set(re.findall(r'href="/problems/([a-z-]+)"', page)) == set(PROBLEMS) - {kind}
    with httpx.Client(base_url=scene.api.url, trust_env=False, verify=NO_AUTHORITY) as stranger:
        page = stranger.get(f"/problems/{kind}").text
    assert 'href="/login"' in page
    assert "Log out" not in page


def test_a_browser_gets_a_page_where_there_is_none_and_a_program_a_problem(scene, visit):
    for path in ("/nope", "/problems/nope"):
        page = visit.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
        assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (404, "text/html")
        assert 'href="/problems/not-found"' in page.text
    for path, accepted in (("/nope", "*/*"), ("/v1/nope", "text/html")):
        told = visit.get(path, headers={"Accept": accepted})
        assert (told.status_code, told.headers["content-type"]) == (404, "application/problem+json")


def test_how_long_something_took_is_told_in_the_unit_that_suits_it():
    from datetime import timedelta  # beside its use

    said = [lasted(START, START + timedelta(seconds=seconds)) for seconds in (-1, 1.25, 59.9, 75, 3700)]
    assert said == ["0.0 s", "1.2 s", "59.9 s", "1 min 15 s", "1 h 1 min"]
    assert lasted(START, None) == "—"
