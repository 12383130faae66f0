"""One exit status for one thing that happens, whichever command it happens to."""

import json
import re
from pathlib import Path

import pytest

from registry.cli.failures import Exit, exit_of
from registry.client import transport
from schemas.problems import PROBLEMS
from tests.registry.test_cli import LEAVES
from tests.support.scripted_http import ScriptedHttp, answer

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
DIGEST, ID, WHY = "3c3aff2a" * 8, "01a2289b-8894-74d9-8d4f-da769c0550b2", ("--reason", "because")
POLICY = ("--policy", DIGEST)
ON = ("--target", "chat@prod")
ASKS: dict[str, tuple[str, ...]] = {
    "alias delete": ("champion", *WHY),
    "alias history": ("champion",),
    "alias list": (),
    "alias patterns": (),
    "alias protect": ("champion", *WHY),
    "alias set": ("champion", DIGEST, *WHY),
    "alias show": ("champion",),
    "blob check": (f"sha256:{DIGEST}",),
    "blob gc": (),
    "bundle delete": (DIGEST, *WHY),
    "bundle diff": (DIGEST, "0" * 64),
    "bundle impact": (DIGEST, "0" * 64),
    "bundle lift": (DIGEST, *WHY),
    "bundle list": (),
    "bundle plan": (DIGEST,),
    "bundle quarantine": (DIGEST, *WHY),
    "bundle show": (DIGEST,),
    "evidence checkpoint": (),
    "evidence erase": (DIGEST, *WHY),
    "evidence export": ("archive.jsonl",),
    "evidence follow": ("--timeout", "60"),
    "evidence keys": (),
    "evidence list": (),
    "evidence revoke": (DIGEST, *WHY),
    "evidence verify": (),
    "gate cancel": (ID, *WHY),
    "gate list": (),
    "login": (),
    "gate run": (DIGEST, *POLICY, "--runner-class", "cpu"),
    "gate watch": (ID, "--timeout", "0"),
    "policy list": (),
    "policy push": (str(Path(__file__).parents[2] / "deploy" / "examples" / "policy.json"),),
    "policy show": (DIGEST,),
    "project create": ("team-b",),
    "project limit": ("team-b", "--jobs", "4"),
    "project list": (),
    "project show": ("team-b",),
    "release approve": (ID, *WHY),
    "release create": (*ON, "--bundle", DIGEST, *POLICY),
    "release list": (),
    "release pause": (ID, *WHY),
    "release promote": (ID, *WHY),
    "release reject": (ID, *WHY),
    "release resume": (ID, *WHY),
    "release rollback": (ID, *WHY),
    "release show": (ID,),
    "release watch": (ID, "--timeout", "0"),
    "release withdraw": (ID, *WHY),
    "runner drain": ("gpu-1", *WHY),
    "runner list": (),
    "runner show": ("gpu-1",),
    "runner undrain": ("gpu-1",),
    "suite list": (),
    "suite push": (str(Path(__file__).parents[2] / "deploy" / "examples" / "golden.json"),),
    "suite record": (DIGEST, "--bundle", DIGEST, *ON, *WHY),
    "suite reference": (DIGEST,),
    "suite show": (DIGEST,),
    "target create": ("chat@prod", "--runner-class", "cpu"),
    "target history": ("chat@prod",),
    "target list": (),
    "target show": ("chat@prod",),
    "token create": ("maria", "--role", "manager"),
    "token list": (),
    "token revoke": (ID, *WHY),
}
"""Command → arguments with which it asks a service for something, and for nothing before that."""
ALONE = {"up", "demo", "bundle create", "bundle validate"}
"""Commands that read what is here before they ask a service, if they do."""
HAPPENS = {
    "not-found": ("2", "nothing found"),
    "invalid-document": ("2", "an invalid document"),
    "not-permitted": ("4", "refused, by role"),
    "transition-refused": ("4", "by what is the case now"),
    "unavailable": ("4", "not reachable"),
    "internal-error": ("3", "the service failed"),
}
"""Kind of problem → the exit status, and the words of the README's table that tell it."""


def told() -> dict[str, str]:
    """Return the README's table: exit status → what it means."""
    section = README.split("| exit status | means |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE))


def test_the_table_tells_each_status_and_what_ends_so():
    assert list(told()) == [str(status.value) for status in Exit]
    for kind, (status, words) in HAPPENS.items():
        assert words in told()[status], kind
        assert str(exit_of(PROBLEMS[kind]("because")).value) == status
    for status, words in (("1", "a gate failed"), ("3", "a gate errored or inconclusive"), ("2", "usage")):
        assert words in told()[status]


def test_every_command_that_asks_a_service_is_tried_here():
    assert {" ".join(path) for path in LEAVES} == {*ASKS, *ALONE}


@pytest.mark.parametrize("kind", ["not-found", "transition-refused", "unavailable", "internal-error"])
def test_what_a_service_answers_ends_every_command_with_the_same_status(command, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transport, "RETRY_PAUSES_SECONDS", ())
    problem = PROBLEMS[kind]("because")
    body = json.dumps(problem.body("http://there")).encode()
    ended = {}
    with ScriptedHttp(lambda asked: answer(problem.status, body, kind="application/problem+json")) as http:
        command.use(http.url, "token")
        for name, arguments in ASKS.items():
            ran = command(*name.split(), *arguments, "--json")
            ended[name] = str(ran.status) if ran.json.get("title") else "not told"
    assert {name: status for name, status in ended.items() if status != HAPPENS[kind][0]} == {}


def test_a_service_that_is_not_there_ends_every_command_with_4_and_usage_with_2(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transport, "RETRY_PAUSES_SECONDS", ())
    with ScriptedHttp(lambda asked: None) as gone:
        url = gone.url
    command.use(url, "token")
    for name, arguments in ASKS.items():
        assert command(*name.split(), *arguments).status == Exit.REFUSED, name
        misused = command(*name.split(), *arguments, "--no-such-option")
        assert (misused.status, misused.out) == (Exit.INVALID, ""), name
        assert misused.err.startswith("error: Usage: No such option: --no-such-option"), name
