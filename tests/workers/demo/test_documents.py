import json
from typing import Any

import jinja2
import pytest

from gates.policy import plan_problems
from schemas.policy import GoldenRule, LoadRule, Policy
from schemas.suite import SUITE, GoldenSuite, LoadSuite
from workers.demo import bundles
from workers.demo.bundles import BROKEN_TEMPLATE, FIRST, LONGER, SLOW
from workers.demo.prompts import SHAPES, conversation, single
from workers.examples import examples

Messages = list[dict[str, str]]


def policy() -> Policy:
    return Policy.parse((examples("policies") / "demo.json").read_bytes())


def suites() -> dict[str, GoldenSuite | LoadSuite]:
    files = sorted(examples("suites").glob("demo-*.json"))
    found = [SUITE.validate_python(json.loads(file.read_bytes())) for file in files]
    return {suite.digest: suite for suite in found}


def prompts() -> list[Messages]:
    return [
        [message.model_dump(mode="json") for message in prompt.messages]
        for suite in suites().values()
        for prompt in suite.prompts
    ]


def rendered(template: str, messages: Messages) -> str:
    environment = jinja2.Environment(autoescape=False)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, bos_token="<bos>")


def test_the_policy_can_decide_with_its_committed_suites():
    assert len(suites()) == 2
    assert plan_problems(policy(), suites()) == []


def test_the_policy_with_a_drill_is_the_demonstration_s_and_can_decide_too():
    drilled = Policy.parse((examples("policies") / "drilled.json").read_bytes())
    assert plan_problems(drilled, suites()) == []
    *others, last = drilled.gates
    assert others == policy().gates
    assert last.gate == "rollback"


def test_what_needs_no_engine_comes_before_what_does():
    assert [rule.gate for rule in policy().gates] == [
        "integrity",
        "static",
        "placement",
        "compatibility",
        "golden",
        "load",
    ]


def test_the_policy_names_the_committed_suites_and_no_others():
    named = {rule.suite for rule in policy().gates if isinstance(rule, GoldenRule | LoadRule)}
    assert named == set(suites())


def test_the_policy_says_that_its_samples_are_a_demonstrations():
    said = policy().description
    assert "Its sample sizes are a demonstration's" in said
    assert "Serve nobody under this policy" in said


def test_its_canary_moves_in_steps_and_can_stop_for_errors_and_for_slowness():
    canary = policy().canary
    assert len(canary.steps) == 3
    assert {condition.metric for condition in canary.stop_conditions} == {"error_ratio", "ttft"}


def test_the_templates_are_three():
    templates = {sort.name: sort.template for sort in (FIRST, LONGER, BROKEN_TEMPLATE, SLOW)}
    assert templates[FIRST.name] == templates[LONGER.name]
    assert len(set(templates.values())) == 3


def test_the_good_template_writes_turns_and_begins_once():
    text = rendered(bundles.TEMPLATE, conversation(0)[-3:])
    assert text.startswith("<bos>Question: ")
    assert text.count("<bos>") == 1
    assert text.endswith("people.\nAnswer:")
    assert "\nAnswer: Yes, without flash.\nQuestion: " in text


@pytest.mark.parametrize("place", range(len(prompts())))
def test_the_broken_template_shows_on_every_prompt_of_the_suites(place):
    messages = prompts()[place]
    good, broken = rendered(bundles.TEMPLATE, messages), rendered(bundles.BROKEN, messages)
    assert broken != good
    assert broken.replace("? Answer:", "?\nAnswer:").replace(". Answer:", ".\nAnswer:") == good


@pytest.mark.parametrize("place", range(len(prompts())))
def test_the_repeating_template_shows_on_no_prompt_of_the_suites(place):
    messages = prompts()[place]
    assert rendered(bundles.REPEATING, messages) == rendered(bundles.TEMPLATE, messages)


def test_the_repeating_template_shows_on_conversations_only():
    def grown(messages: Messages) -> float:
        return len(rendered(bundles.REPEATING, messages)) / len(rendered(bundles.TEMPLATE, messages))

    assert grown(conversation(3)) > 5
    assert grown(single(3)) == 1


def test_conversations_share_their_beginning_and_end_differently():
    first, second = (rendered(bundles.TEMPLATE, conversation(number)) for number in (0, 1))
    shared = len(first) - len(first.rpartition("Question:")[2])
    assert first[:shared] == second[:shared]
    assert first != second
    assert shared > 0.85 * len(first)


def test_live_traffic_holds_both_shapes():
    shares: dict[str, Any] = {shape.name: shape.share for shape in SHAPES}
    assert set(shares) == {"single", "conversation"}
    assert sum(shares.values()) == pytest.approx(1)
