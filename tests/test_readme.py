"""The README is checked against the code: a name that is missing or wrong there fails here."""

import re
from pathlib import Path
from typing import get_args

import pytest

from gates.arrivals import make_suite
from gates.booted.comparison import BELOW_PLAN, FILES_UNREAD, ITEMS, MORE_MODELS
from gates.catalog import CATALOG
from gates.couplings import COUPLINGS
from gates.difference import AFFECTS, PARTS
from gates.features import JOINTS
from gates.policy import plan_problems
from gates.static.declared import Declared, read_declared
from gates.static.report import markdown
from registry.auth import PERMISSIONS
from registry.cli.suites import read_suite
from registry.cli.yaml_files import read_yaml
from registry.lifecycle import BEFORE_TRAFFIC, NEXT
from registry.settings import RunnerSettings, Settings
from schemas.api import RoleName
from schemas.failures import FAILURES
from schemas.holds import WHAT_TO_DO, Hold
from schemas.policy import Policy, SuiteRule
from schemas.problems import PROBLEMS
from schemas.release import Phase
from schemas.result import Severity, Verdict
from schemas.suite import GoldenSuite, LoadSpec

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
ROLES = get_args(RoleName)


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table under a heading: first cell without back quotes → other cells."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_every_phase_is_described_and_leads_where_the_table_says() -> None:
    described = table("Life of a release")
    assert list(described) == [str(phase) for phase in Phase]
    for (phase, _), following in NEXT.items():
        if following not in {phase, Phase.REJECTED}:
            assert f"`{following}`" in " ".join(described[phase]), (phase, following)
        # What leads to everything else than the table of the code is a promise that nobody keeps.
        led_to = set(re.findall(r"→ `(\w+)`", described[phase][1]))
        assert led_to <= {after for (before, _), after in NEXT.items() if before is phase}, phase
    assert {phase for (phase, _), after in NEXT.items() if after is Phase.REJECTED} == set(BEFORE_TRAFFIC)
    assert "from each phase before `canary`" in described[Phase.REJECTED][0]


def test_the_picture_has_every_process_that_the_process_table_has() -> None:
    picture = README.split("\n## How it fits together\n", 1)[1].split("```", 2)[1]
    # An engine is one process in the picture, whether it serves or gates ask it.
    rows = set(table("The stack on one machine")) - {"supervisor"}
    processes = {"engine" if name.startswith("engine ") else name for name in rows}
    assert len(processes) > 6
    assert {name for name in processes if name not in picture} == set()
    assert max(map(len, picture.splitlines())) <= 100


def test_every_gate_and_verdict_is_described() -> None:
    assert list(table("Gates")) == list(CATALOG)
    for verdict in Verdict:
        assert f"`{verdict}`" in README


@pytest.mark.parametrize("action", PERMISSIONS)
def test_the_permission_table_is_the_code_s_cell_by_cell(action: str) -> None:
    cells = table("Who may do what")[action]
    assert {role for role, cell in zip(ROLES, cells, strict=True) if cell == "yes"} == PERMISSIONS[action]


def test_the_permission_table_has_nothing_more() -> None:
    assert set(table("Who may do what")) == set(PERMISSIONS)


def test_every_setting_is_described_with_its_default() -> None:
    section = README.split("\n## Settings\n", 1)[1].split("\n## ", 1)[0]
    for settings, prefix in ((Settings, "SLUICEGATE_"), (RunnerSettings, "SLUICEGATE_RUNNER__")):
        for name, field in settings.model_fields.items():
            if name == "gateways":
                assert "SLUICEGATE_GATEWAYS__<name>__URL" in section
                continue
            line = next((row for row in section.splitlines() if row.startswith(f"| `{prefix}{name.upper()}` |")), None)
            assert line is not None, f"{prefix}{name.upper()} is not described"
            assert str(field.description) in line
            if not field.is_required() and field.default is not None:
                assert f"`{field.default}`" in line


def test_every_problem_is_described_with_its_status() -> None:
    described = table("Problems")
    assert list(described) == list(PROBLEMS)
    for kind, problem in PROBLEMS.items():
        assert described[kind][0] == str(problem.status)
        assert described[kind][1] == " ".join(str(problem.__doc__).split())


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(found) for found in re.findall(r"^\*\*D(\d+)\. ", README, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


EXAMPLES = Path(__file__).parents[1] / "deploy" / "examples"


def example(name: str) -> str:
    """Return a file as the README shows it: it must be the one that lies there to be copied."""
    shown = README.split(f"`deploy/examples/{name}`", 1)[1].split("```json\n", 1)[1].split("```", 1)[0]
    assert shown == (EXAMPLES / name).read_text("utf-8")
    return shown


def test_the_files_of_the_example_fit_each_other_and_can_decide() -> None:
    assert {file.name for file in EXAMPLES.iterdir()} == {"golden.json", "load-spec.json", "policy.json"}
    suites = {suite.digest: suite for suite in map(read_suite, sorted(EXAMPLES.glob("[gl]*.json")))}
    policy = Policy.model_validate_json(example("policy.json"))
    assert {rule.suite for rule in policy.gates if isinstance(rule, SuiteRule)} == set(suites)
    assert plan_problems(policy, suites) == []
    assert suites[GoldenSuite.model_validate_json(example("golden.json")).digest]


def test_the_load_spec_of_the_readme_draws_a_plan() -> None:
    spec = LoadSpec.model_validate_json(example("load-spec.json"))
    assert len(make_suite(spec).plan) == spec.requests
    section = README.split("\n## Command line\n", 1)[1].split("\n## ", 1)[0]
    assert [name for name in LoadSpec.model_fields if f"`{name}`" not in section and f'"{name}"' not in section] == []


def test_the_catalogue_of_static_findings_is_the_code_s() -> None:
    section = README.split("\n## Static validation\n", 1)[1].split("\n## ", 1)[0]
    assert markdown() in section


def rows_of(section: str) -> list[list[list[str]]]:
    """Return the tables of a section, each as rows of cells without back quotes."""
    text = README.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    blocks = [re.findall(r"^\|.*\|$", block, re.MULTILINE) for block in text.split("\n\n")]
    return [
        [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]
        for lines in blocks
        if lines
    ]


def test_the_tables_of_what_carries_over_are_the_code_s() -> None:
    parts, gates, together = rows_of("Comparing bundles")
    assert parts == [[part, AFFECTS[part]] for part in PARTS]
    assert gates == [[gate, ", ".join(row.carries) or "none of them", row.bound_to] for gate, row in COUPLINGS.items()]
    assert together == [[one.name, ", ".join(one.gates) or "none", one.unseen or ""] for one in JOINTS]


def test_the_declaration_of_the_readme_is_read_whole() -> None:
    section = README.split("\n## Static validation\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    declared = read_declared(read_yaml(block.encode(), limit=10_000))
    untold = {"image", "max_sequences", "tool_parser", "reasoning_parser", "template_file", "shutdown_seconds"}
    empty = Declared()
    unread = {name for name in Declared.__slots__ if getattr(declared, name) == getattr(empty, name)}
    assert unread == untold | {"variables", "template_arguments", "code"}


def test_what_to_do_about_each_reason_for_holding_is_the_code_s() -> None:
    ends = "`release reject` or `release rollback` ends it"
    words = {"id": "RELEASE", "bundle": "BUNDLE", "resume": "`release resume`", "end": ends}
    told = {name: cells[-1] for name, cells in table("When a release holds").items()}
    assert told == {str(hold): WHAT_TO_DO[hold].format(**words) for hold in Hold}


def test_the_classes_of_failures_are_the_code_s() -> None:
    (told,) = rows_of("When an engine fails")
    again = {(True, False): "yes", (False, True): "none", (False, False): "live only"}
    assert told == [
        [cause, one.meaning.replace("`", ""), again[one.is_transient, one.is_final], one.advice.replace("`", "")]
        for cause, one in FAILURES.items()
    ]


def test_the_codes_of_what_booted_are_the_code_s() -> None:
    (told,) = rows_of("What booted")
    weighs = {"blocks": Severity.BLOCK, "warns": Severity.WARN}
    severities: dict[str, Severity] = {}
    for codes, weight, _ in told:
        names, weights = codes.split(", "), weight.split(", ")
        all_weights = weights if len(weights) == len(names) else weights * len(names)
        severities |= zip(names, map(weighs.__getitem__, all_weights), strict=True)
    beside = {BELOW_PLAN: Severity.WARN, MORE_MODELS: Severity.WARN, FILES_UNREAD: Severity.WARN}
    assert severities == {item.code: item.severity for item in ITEMS.values()} | beside
