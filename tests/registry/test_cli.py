import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from sqlalchemy import text

from registry.cli import follow, memory, output, profile, program
from registry.cli.failures import Exit, exit_of
from schemas.problems import PROBLEMS
from tests.support.command import Command
from tests.support.scripted_http import ScriptedHttp, answer
from workers.demo import __main__ as demo
from workers.embedded import __main__ as embedded

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "up": None,
    "demo": None,
    "login": None,
    "bundle": {
        "create",
        "validate",
        "plan",
        "diff",
        "impact",
        "show",
        "list",
        "delete",
        "quarantine",
        "lift",
    },
    "alias": {"set", "list", "show", "history", "delete", "protect", "patterns"},
    "blob": {"check", "gc"},
    "policy": {"push", "show", "list"},
    "suite": {"push", "show", "list", "record", "reference"},
    "target": {"create", "show", "history", "list"},
    "release": {
        "create",
        "show",
        "list",
        "watch",
        "approve",
        "withdraw",
        "reject",
        "pause",
        "resume",
        "promote",
        "rollback",
    },
    "gate": {"run", "watch", "cancel", "list"},
    "evidence": {"list", "follow", "verify", "checkpoint", "export", "keys", "revoke", "erase"},
    "runner": {"drain", "list", "show", "undrain"},
    "token": {"create", "list", "revoke"},
    "project": {"create", "list", "show", "limit"},
}
LEAVES = [
    [group, *([name] if name else [])] for group, names in COMMANDS.items() for name in sorted(names or {None}, key=str)
]
STARTED = (["up"], ["demo"])


def test_the_commands_are_the_ones_that_were_agreed():
    root = typer.main.get_command(program.app)
    found = {name: set(getattr(command, "commands", {})) or None for name, command in root.commands.items()}
    assert found == COMMANDS


def test_the_readme_names_every_command_and_exit_status():
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in LEAVES:
        assert f"`sluicegate {' '.join(path)}`" in readme
    for status in Exit:
        assert f"\n| {status.value} | " in readme


@pytest.mark.parametrize("path", [leaf for leaf in LEAVES if leaf not in STARTED], ids=" ".join)
def test_every_command_explains_itself_with_examples_and_speaks_json(command, path):
    ran = command.ok(*path, "--help")
    assert f"Usage: sluicegate {' '.join(path)}" in ran.out
    assert "--json" in ran.out
    shown = ran.out.split("Examples:")[1].strip().splitlines()
    assert shown
    for example in shown:
        assert example.strip().startswith(f"sluicegate {' '.join(path)}")


@pytest.mark.parametrize("path", [[], *([group] for group, names in COMMANDS.items() if names)], ids=str)
def test_a_group_alone_shows_its_commands_and_is_a_usage_error(command, path):
    ran = command(*path)
    assert (ran.status, ran.out) == (2, "")
    assert "Commands:" in ran.err
    # What a command does is a whole sentence, however many lines that takes.
    assert "..." not in ran.err.split("Commands:")[1]
    assert ran.err.rstrip().endswith(".") or "Examples:" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["relese", "list"], "No such command 'relese'. Did you mean 'release'?; see `sluicegate --help`"),
        (["release", "list", "--phse", "x"], "No such option: --phse; did you mean --phase?; see"),
        (["release", "list", "--phase", "canari"], "'rolled_back'; did you mean canary?; see"),
        (["bundle", "nope"], "No such command 'nope'"),
        (["release", "list", "--nope"], "No such option"),
        (["release", "watch"], "Missing argument 'RELEASE'"),
        (["release", "approve", "01a2289b-8894"], "Missing option '--reason'"),
        (["release", "list", "--phase", "nope"], "nope"),
        (["release", "list", "--limit", "0"], "limit"),
        (["release", "create", "--until", "never"], "never"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(command, arguments, said):
    ran = command(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: Usage: ")
    assert said in ran.err
    assert "--help`" in ran.err
    assert len(ran.err.splitlines()) == 1

    ran = command(*arguments, "--json")
    assert (ran.status, ran.err) == (2, "")
    assert ran.json["title"] == "Usage"
    assert said in ran.json["detail"]


def test_the_version_is_said(command):
    assert command.ok("--version").out == "sluicegate 0.1.0\n"


@pytest.mark.parametrize("kind", PROBLEMS, ids=str)
def test_each_problem_has_an_exit_status_and_is_told_once(command, kind):
    problem = PROBLEMS[kind]("because", errors=[{"pointer": "/a", "detail": "is wrong"}])
    expected = {
        **dict.fromkeys((401, 403, 408, 409, 412, 429, 503), Exit.REFUSED),
        **dict.fromkeys((400, 404, 405, 413, 415, 422), Exit.INVALID),
        **dict.fromkeys((500, 502), Exit.UNDECIDED),
    }[problem.status]
    expected = Exit.DEFECT if kind == "defect" else expected  # only the command itself says so
    assert exit_of(problem) is expected
    body = json.dumps(problem.body("http://there") | {"request_id": "r-1"}).encode()
    with ScriptedHttp(lambda asked: answer(problem.status, body, kind="application/problem+json")) as http:
        command.use(http.url, "token")
        told, told_json = command("bundle", "list"), command("bundle", "list", "--json")
    assert told.status == told_json.status == expected
    assert told.out == ""
    assert told.err.splitlines()[:2] == [f"error: {problem.title}: because", "  /a: is wrong"]
    assert ("r-1" in told.err) == (problem.status >= 500)
    assert told_json.json["title"] == problem.title
    assert told_json.json["errors"] == [{"pointer": "/a", "detail": "is wrong"}]
    assert told_json.err == ""


def test_no_service_and_no_answer_are_status_4(command):
    ran = command("bundle", "list")
    assert ran.status == 4
    assert "sluicegate login URL" in ran.err
    with ScriptedHttp(lambda asked: None) as gone:
        url = gone.url
    command.use(url, "token")
    ran = command("bundle", "list", "--json")
    assert ran.status == 4
    assert ran.json["title"] == "Unavailable"


def test_who_cannot_get_in_is_told_what_to_look_at(command, stack):
    with ScriptedHttp(lambda asked: None) as gone:
        url = gone.url
    command.use(url, "token")
    assert "`sluicegate up` starts a service on this machine" in command("bundle", "list").err
    command.use(stack.url, "slg_wrong")
    assert "the token is from SLUICEGATE_TOKEN; `sluicegate login" in command("bundle", "list").err
    told = command("bundle", "list", "--json")
    assert (told.err, told.json["title"]) == ("", "Unauthenticated")
    command.ok("login", stack.url, "--token", stack.tokens["viewer"])
    command.use(stack.url, None)
    with stack.service.database.transaction() as session:
        session.execute(text("UPDATE tokens SET expires_at = now() WHERE name = 'viewer'"))
    assert "config.json; `sluicegate login" in command("bundle", "list").err
    command.home.joinpath("config", "sluicegate", "config.json").unlink()
    assert "the token is missing" in command("bundle", "list").err


@pytest.mark.parametrize(
    ("detail", "advice"),
    [
        ("there is no runner nope", "`sluicegate runner list` shows all of them"),
        ("there is no runner nope; `sluicegate up` starts one", None),
        ("there is no bundle deadbeef", "`sluicegate bundle list` shows all of them"),
        ("there is no project team-z", "`sluicegate project list` shows all of them, to administrators"),
        ("there is no page deadbeef", None),
    ],
)
def test_what_is_not_there_leads_to_what_is_and_nothing_is_said_twice(command, detail, advice):
    members = {"users": [{"holder": "r-7", "why": "it is live"}, {"holder": "runner nope", "why": "there is no"}]}
    body = json.dumps(PROBLEMS["not-found"](detail, **members).body("http://there")).encode()
    with ScriptedHttp(lambda asked: answer(404, body, kind="application/problem+json")) as http:
        command.use(http.url, "token")
        said = command("runner", "show", "nope").err.splitlines()
    assert said[0] == f"error: Not found: {detail}"
    assert "  r-7: it is live" in said
    assert ("  runner nope: there is no" in said) == ("runner nope" not in detail)
    assert [line.strip() for line in said[1:] if "list" in line] == ([advice] if advice else [])


def test_a_list_that_goes_on_says_so(command, stack):
    command.be("admin", stack)
    ran = command.ok("token", "list", "--limit", "2")
    assert len(ran.out.splitlines()) == 3
    assert "the first 2; there are more: --limit 4 shows some of them" in ran.err
    assert command.ok("token", "list", "--limit", "7").err == ""
    assert len(command.ok("token", "list", "--limit", "2", "--json").json["items"]) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sluicegate rel", {"release"}),
        ("sluicegate release prom", {"promote"}),
        ("sluicegate release list --ph", {"--phase"}),
    ],
)
def test_a_shell_is_told_what_a_word_can_become(words, expected):
    environment = {
        **os.environ,
        "_SLUICEGATE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; from registry.cli import main; sys.exit(main([]))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert set(ran.stdout.split()) == expected, ran


def test_a_defect_is_one_line_and_no_traceback(command, monkeypatch):
    monkeypatch.setattr(program, "command_line", lambda: 1 / 0)
    ran = command("bundle", "list")
    assert ran.status == Exit.DEFECT == 70  # never 3: a pipeline would take it for a gate that is undecided
    assert len(ran.err.splitlines()) == 1
    assert "ZeroDivisionError" in ran.err
    monkeypatch.setenv("SLUICEGATE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        command("bundle", "list")


def _numbers(group, path=()):
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from _numbers(one, (*path, name))
        else:
            numbers = [each for each in one.params if _type(each) in (int, float)]
            yield from ((*path, name, each) for each in numbers)


def _type(option):
    return getattr(getattr(option, "type_descriptor", None), "annotation", None)


def test_every_number_has_a_least_and_a_most_and_beyond_them_is_usage(command):
    found = list(_numbers(program.command_line()))
    assert len(found) > 20
    for *path, option in found:
        bounds = (option.min, option.max)
        assert None not in bounds, (path, option.name)
        beyond = [bounds[0] - 1, bounds[1] + 1, "9" * 30, *(("nan", "inf") if _type(option) is float else ())]
        for value in beyond:
            # What is required beside is asked for only after a number has been read.
            required = [word for each in command_at(path).params if each.required for word in _given(each)]
            ran = command(*path, *required, f"{option.opts[0]}={value}")
            assert (ran.status, option.opts[0] in ran.err) == (2, True), (path, value, ran)


def command_at(path):
    one = program.command_line()
    for name in path:
        one = one.commands[name]
    return one


def _given(option):
    return [option.opts[0], "x"] if option.opts[0].startswith("-") else ["x"]


def test_what_others_wrote_cannot_move_the_terminal(command):
    document = {
        "digest": "sha256:" + "0" * 64,
        "name": "evil\x1b[2J\u202ename\n",
        "schema_id": "sluicegate.dev/suite/golden/v1",
        "created_at": "2026-11-29T00:00:00Z",
        "created_by": "[bold]x[/bold]",
        "document": None,
        "serving_digest": None,
        "components": None,
        "labels": None,
        "quarantine": None,
        "locks": None,
        "aliases": None,
    }
    page = json.dumps({"items": [document], "next": None}).encode()
    with ScriptedHttp(lambda asked: answer(200, page)) as http:
        command.use(http.url, "token")
        ran = command.ok("suite", "show")
        assert command.ok("suite", "show", "--json").json["items"][0]["name"] == document["name"]
    assert "\x1b" not in ran.out
    assert "\u202e" not in ran.out
    assert "evil\ufffd[2J\ufffdname" in ran.out
    assert "[bold]x[/bold]" in ran.out
    assert document["digest"] in ran.out


def test_a_document_that_only_a_newer_command_knows_is_said_so(command):
    stored = {
        "digest": "sha256:" + "0" * 64,
        "name": "later",
        "schema_id": "sluicegate.dev/policy/v2",
        "created_at": "2026-11-29T00:00:00Z",
        "created_by": "maria",
        "document": {"schema": "sluicegate.dev/policy/v2"},
        "serving_digest": None,
        "components": None,
        "labels": None,
        "quarantine": None,
        "locks": None,
        "aliases": None,
    }
    with ScriptedHttp(lambda asked: answer(200, json.dumps(stored).encode())) as http:
        command.use(http.url, "token")
        ran = command("policy", "show", "0" * 64)
        assert command.ok("policy", "show", "0" * 64, "--json").json["document"] == stored["document"]
    assert ran.status == 3
    assert "--json shows it" in ran.err


def test_a_closed_pipe_is_no_error():
    code = "import sys; from registry.cli import main; sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ran:
        ran.stdout.close()
        said = ran.stderr.read()
        assert ran.wait(timeout=30) in (0, 1)
    assert b"Traceback" not in said
    assert b"Exception" not in said


# ---------------------------------------------------------------------------------------------------- login


def test_login_keeps_a_token_that_the_service_accepts(command, stack):
    ran = command.ok("login", stack.url + "/", "--token", stack.tokens["engineer"], "--json")
    written = Path(ran.json["file"])

    assert ran.json == {
        "url": stack.url,
        "project": "default",
        "name": "engineer",
        "role": "engineer",
        "targets": None,
        "expires_at": None,
        "file": str(command.home / "config" / "sluicegate" / "config.json"),
    }
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert command.ok("bundle", "list", "--json").json == {"items": []}
    assert command.ok("login").out.startswith("engineer, engineer of project default")
    assert stack.tokens["engineer"] not in ran.out + ran.err


def test_login_keeps_nothing_that_the_service_refuses(command, stack):
    assert command("login", stack.url, "--token", "slg_wrong").status == 4
    assert command("login", "not a url", "--token", "x").status == 2
    assert command("login", stack.url).status == 2  # no token, and nobody to ask
    assert not (command.home / "config" / "sluicegate" / "config.json").exists()


def test_login_reads_the_token_from_standard_input(command, stack, monkeypatch):
    read, write = os.pipe()
    os.write(write, stack.tokens["manager"].encode() + b"\n")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command.ok("login", stack.url, "--token", "-", "--json").json["role"] == "manager"


def test_the_environment_comes_before_what_login_wrote(command, stack):
    command.ok("login", stack.url, "--token", stack.tokens["engineer"])
    command.use(stack.url, stack.tokens["manager"])
    assert command.ok("login", "--json").json["role"] == "manager"


def test_a_kept_token_is_never_sent_to_another_address(command, stack):
    command.ok("login", stack.url, "--token", stack.tokens["engineer"])
    with ScriptedHttp(lambda asked: answer(401)) as other:
        command.use(other.url, None)
        assert command("bundle", "list").status == 4
    assert "authorization" not in other.asked[0].headers


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_configuration_is_said(command, text):
    place = command.home / "config" / "sluicegate"
    place.mkdir(parents=True)
    (place / "config.json").write_text(text)
    ran = command("bundle", "list")
    assert ran.status == 2
    assert "config.json" in ran.err


def test_folders_follow_the_standard_and_ignore_relative_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile.folder("cache", {"XDG_CACHE_HOME": "/c"}) == Path("/c/sluicegate")
    assert profile.folder("cache", {"XDG_CACHE_HOME": "c"}) == tmp_path / ".cache" / "sluicegate"
    assert profile.folder("config", {}) == tmp_path / ".config" / "sluicegate"


# ------------------------------------------------------------------------------------------------ up and demo


@pytest.fixture
def started(tmp_path):
    """Runs a command where `workers` is a package that only tells how it was started."""
    package = tmp_path / "path" / "workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module in ("embedded", "demo"):
        tell = "import json, os, sys\nprint(json.dumps([__spec__.name, os.getpid(), sys.argv[1:]]))\nsys.exit(7)\n"
        (package / f"{module}.py").write_text(tell)
    # What lies where the command is called must never be run.
    (tmp_path / "here" / "workers").mkdir(parents=True)
    (tmp_path / "here" / "workers" / "__init__.py").touch()
    (tmp_path / "here" / "workers" / "embedded.py").write_text("print('not ours')")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import os, sys; print(os.getpid(), flush=True); from registry.cli import main; sys.exit(main())"
        paths = os.pathsep.join([str(package.parent), str(ROOT)])
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=tmp_path / "here",
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(("name", "module"), [("up", "workers.embedded"), ("demo", "workers.demo")])
def test_up_and_demo_become_the_other_program_with_every_argument(started, name, module):
    ran = started(name, "--data", "some where", "--json", "FILE", "rest")
    before, told = ran.stdout.splitlines()
    assert json.loads(told) == [module, int(before), ["--data", "some where", "--json", "FILE", "rest"]]
    assert ran.returncode == 7
    assert ran.stderr == ""


@pytest.mark.parametrize("name", ["up", "demo"])
def test_up_and_demo_that_are_interrupted_while_they_load_show_no_traceback(started, tmp_path, name):
    for module in ("embedded", "demo"):
        (tmp_path / "path" / "workers" / f"{module}.py").write_text("raise KeyboardInterrupt")
    ran = started(name, "--data", "here")
    assert (ran.returncode, ran.stderr) == (Exit.INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("name", ["up", "demo"])
def test_the_help_of_up_and_demo_is_their_own(started, name):
    ran = started(name, "--help")
    assert json.loads(ran.stdout.splitlines()[1])[2] == ["--help"]
    assert ran.returncode == 7


@pytest.mark.parametrize(("name", "main"), [("up", embedded.main), ("demo", demo.main)])
def test_the_help_of_up_and_demo_looks_as_that_of_every_command(capsys, name, main):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: sluicegate {name} [OPTIONS]\n")
    assert f"\n  Examples:\n    sluicegate {name}\n" in said


# --------------------------------------------------------------------------------------------------- the rest


def test_sizes_and_weights_are_written_for_people():
    assert [output.size(count) for count in (0, 999, 1000, 253_113_024, 10**13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "253.1 MB",
        "10.0 TB",
    ]
    assert [output.percent(weight) for weight in (None, 0, 1, 250, 10_000)] == ["", "0 %", "0.01 %", "2.5 %", "100 %"]


def test_a_memory_that_cannot_be_used_only_costs_time(tmp_path):
    path = tmp_path / "hashes.sqlite"
    with memory.HashMemory(path) as remembered:
        remembered.put("key", "value")
        assert remembered.get("key") == "value"
        assert remembered.get("other") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    path.write_bytes(b"this is no database, and longer than its header would be" * 10)
    with memory.HashMemory(path) as remembered:  # damaged: made anew
        assert remembered.get("key") is None
        remembered.put("key", "again")
        assert remembered.trouble is None

    (tmp_path / "file").write_text("in the way")
    with memory.HashMemory(tmp_path / "file" / "hashes.sqlite") as remembered:
        remembered.put("key", "value")
        assert remembered.get("key") is None
        assert "cannot be used" in remembered.trouble


def test_what_was_not_used_for_half_a_year_is_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "hashes.sqlite"
    with memory.HashMemory(path) as remembered:
        remembered.put("old", "value")
    monkeypatch.setattr(memory, "FORGET_SECONDS", -10)
    with memory.HashMemory(path) as remembered:
        assert remembered.get("old") is None


def test_following_waits_out_a_service_that_is_away(monkeypatch):
    from schemas.problems import Unavailable  # beside its use

    monkeypatch.setattr(follow, "INTERVAL_SECONDS", 0.01)
    looks = iter([Unavailable("gone"), Unavailable("gone"), "seen"])
    notes = []

    def look():
        step = next(looks)
        if isinstance(step, Unavailable):
            raise step
        return step

    assert follow._patiently(look, notes.append, lambda: 10.0) == "seen"
    assert [str(one) for one in notes] == ["gone", "gone"]
    looks = iter([Unavailable("gone")])
    with pytest.raises(Unavailable):  # time is up
        follow._patiently(look, notes.append, lambda: 0.0)


def test_the_command_line_loads_nothing_of_the_service():
    code = (
        "import sys, registry.cli.program as program\n"
        "assert len(list(program.command_line().commands.values())) > 10\n"  # each loads what it needs
        "heavy = {'sqlalchemy', 'celery', 'fastapi', 'starlette', 'psycopg', 'redis', 'scipy', 'numpy', 'workers'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


LIGHT = ("--version", "--help", "", "relese list")


@pytest.mark.parametrize("words", LIGHT, ids=lambda words: words or "alone")
def test_what_a_command_needs_is_loaded_by_that_command_alone(words):
    code = (
        "import atexit, sys, registry.cli\n"
        f"status = registry.cli.main({words.split()!r})\n"
        "held = {name for name in sys.modules if name.startswith(('registry.', 'gates.', 'schemas.'))}\n"
        "heavy = {'httpx', 'ssl', 'pydantic', 'rich', 'yaml', 'sqlite3'} & sys.modules.keys()\n"
        "print(sorted(held), sorted(heavy), status, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    told = ran.stderr.splitlines()[-1]
    if words != "relese list":  # what is wrong with a command line is told in colours
        ours = ["registry.cli", "registry.cli.ending", "registry.cli.failures", "registry.cli.options"]
        ours += ["registry.cli.output", "registry.cli.program", "schemas.problems"]
        assert told.startswith(f"{ours} [] "), told
    for module in ("registry.client", "registry.cli.bundles", "registry.cli.local", "gates.directory", "'httpx'"):
        assert module not in told


def test_a_command_loads_nothing_of_the_others():
    code = "import sys, registry.cli; registry.cli.main(['blob', 'gc', '--help']); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    held = set(ran.stderr.split())
    assert "registry.cli.blobs" in held
    assert not held & {f"registry.cli.{name}" for name in ("bundles", "releases", "evidence", "runs", "local")}


def test_a_person_of_the_tests_is_alone(command: Command):
    assert command.home.exists()
    assert "SLUICEGATE_TOKEN" not in os.environ
