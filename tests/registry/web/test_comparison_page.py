"""Two bundles on one page: what it says, how one comes there, and that nothing of a document becomes markup."""

import re

import pytest

from gates.difference import IN_WEIGHTS
from schemas.result import Verdict
from tests.registry.web.test_detail_pages import text_of
from tests.support.factories import bundle_body, file_entry, registered_bundle
from tests.support.phases import promoted

EVIL = "<img src=x onerror=alert(1)>'\""


@pytest.fixture
def visit(scene):
    with scene.api.visitor("viewer") as client:
        yield client


def test_a_page_tells_what_differs_what_it_asks_for_and_leads_there_and_back(scene, visit):
    manager = scene.api.actor("manager")
    engine = bundle_body()["engine"] | {"arguments": ["--threads", "2", "--note", EVIL]}
    later = registered_bundle(
        scene.service,
        manager,
        runtime={"context_tokens": 1024, "max_sequences": 4, "prefix_caching": True},
        engine=engine,
        description=EVIL,
    )
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate(compatibility=Verdict.PASSED)
    scene.target()
    promoted(scene.service, manager, scene.bundle.digest, scene.policy.digest)

    address = f"/bundles/{scene.bundle.digest}/diff/{later.digest}"
    page = visit.get(address).text
    said = text_of(page)
    for expected in (
        "3 of 16 parts differ",
        "serves other than before, by engine, runtime",
        "/runtime/context_tokens 512 1024",
        "/runtime/prefix_caching — true",
        "--threads 2 --note",
        "Kernels, scheduling, defaults",
        "compatibility run again engine Wire format, errors and limits are the engine's own.",
        "passed",
        "on runner-1",
        "prefix cache + multiple tenants",
        "no gate",
        "A release runs every gate that its policy demands",
        "driver compatibility, golden, structured, load, rollback again when it changes",
        "8 run again, 0 carry over",
        "engine, runtime, description Each bundle is staged in a folder",
    ):
        assert expected in said.replace("&#39;", "'"), expected
    assert "<img src=x" not in page
    assert f'href="/bundles/{later.digest}/diff/{scene.bundle.digest}"' in page
    assert '<mark class="good">--threads</mark>' in page
    one = text_of(visit.get(address, params={"policy": scene.policy.digest}).text)
    assert "golden" not in re.sub(r".*Evidence before", "", one).split("A release runs")[0]
    assert "integrity run again" in one

    release = scene.command.ok(
        "release", "create", "-t", "chat@prod", "-b", later.digest, "-p", scene.policy.digest, "--json"
    ).json["id"]
    assert f'href="{address}"' in visit.get("/targets/chat@prod").text
    scene.command.ok("release", "reject", release, "-r", "only looked at")

    first, second = (
        registered_bundle(
            scene.service,
            manager,
            content=raw,
            files=[file_entry("model.gguf", raw, "weights"), file_entry("t.jinja", raw, "template")],
        ).digest
        for raw in (b"{{ a }}\nb\n", f"{{{{ a }}}}\n{EVIL}\u202e\n".encode())
    )
    changed = visit.get(f"/bundles/{first}/diff/{second}").text
    assert '<mark class="bad">-b</mark>\n<mark class="good">+&lt;img src=x onerror=alert(1)&gt;' in changed
    assert "<img src=x" not in changed
    seen, same = text_of(changed).replace("&#39;", "'").split("Not seen ", 1)[1].split("The same ", 1)
    assert seen.strip() == f"tokenizer {IN_WEIGHTS}", "of the template, its own part says that it differs"
    assert "tokenizer" not in same.split("Gates")[0]
    told = scene.command.ok("bundle", "diff", first, second).out
    assert f"t.jinja:\n  @@ -1,3 +1,3 @@\n   {{{{ a }}}}\n  -b\n  +{EVIL}\ufffd\n" in told

    # From a bundle's page: by a suggestion, by the line on its family, or by what somebody writes.
    own = visit.get(f"/bundles/{later.digest}").text
    assert f'href="{address}"' in own
    assert f'<option value="{scene.bundle.digest[7:19]}">accepted by chat@prod</option>' in own
    led = visit.get(f"/bundles/{later.digest}/compare", params={"with": f" {scene.bundle.digest[7:15]} "})
    assert (led.status_code, led.headers["location"]) == (303, address)


def test_a_title_alone_leaves_what_is_served_and_one_and_the_same_has_no_difference(scene, visit):
    manager = scene.api.actor("manager")
    titled = registered_bundle(scene.service, manager, description="A title.")
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate()
    said = text_of(visit.get(f"/bundles/{scene.bundle.digest}/diff/{titled.digest}").text)
    assert "nothing that is served differs" in said
    assert "compatibility carries over description" in said
    assert "It holds only for the runner" in said
    said = text_of(visit.get(f"/bundles/{titled.digest}/diff/{titled.digest}").text)
    assert "the same bundle" in said
    assert "0 of 16 parts differ" in said
    for wrong in (
        "compare?with=nothing",
        f"compare?with={'../' * 21}x",
        "compare",
        f"diff/{'0' * 64}",
        "diff/nothing",
        f"diff/{titled.digest}?policy=x",
    ):
        missing = visit.get(f"/bundles/{titled.digest}/{wrong}")
        assert missing.status_code == 404, wrong
        assert 'href="/targets"' in missing.text
