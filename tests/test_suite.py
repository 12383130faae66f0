"""What `make test` does about tests that fail: a few are run once more, alone, and count by that."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from tests.suite import MOST_AGAIN, PHASES, Session, again, phases
from tests.support import logs

UNSTEADY = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_suffix(".seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
BROKEN = "def test_never():\n    assert False\n"


@pytest.fixture(autouse=True)
def _without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed beside pytest takes two seconds to load, and none of it is asked here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(tests: Sequence[str], memory: Path) -> tuple[Session, int]:
    session = Session(["-q", "-p", "no:randomly", *tests], memory)
    return session, session.finish()


@pytest.mark.parametrize(("text", "status"), [(UNSTEADY, 0), (BROKEN, 1)], ids=["unsteady", "broken"])
def test_what_failed_is_run_once_more_and_counts_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str, status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_given.py").write_text(text, "utf-8")
    session, first = run(["test_given.py"], tmp_path / "first")
    assert first == 1
    assert again([session], [first], tmp_path / "again") == status
    assert ("UNSTEADY" in capfd.readouterr().out) == (status == 0)


@pytest.mark.parametrize(
    "text",
    ["".join(f"def test_{number}(): assert False\n" for number in range(MOST_AGAIN + 1)), "raise RuntimeError"],
    ids=["too many", "not collected"],
)
def test_what_is_no_stumble_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_given.py").write_text(text, "utf-8")
    session, first = run(["test_given.py"], tmp_path / "first")
    assert first != 0
    assert again([session], [first], tmp_path / "again") == 1
    assert "Once more" not in capfd.readouterr().out


def test_after_a_silence_the_log_is_as_plain_as_before() -> None:
    """Structlog's own default draws tracebacks, which took a third of the time of all tests."""
    before = structlog.get_config()
    assert isinstance(before["processors"][-1], structlog.processors.KeyValueRenderer)
    with logs.silent():
        assert structlog.get_config() != before
    assert structlog.get_config() == before


def is_below(file: Path, places: Sequence[str]) -> bool:
    return any(file == Path(place) or Path(place) in file.parents for place in places)


def test_every_file_of_tests_is_run_by_exactly_one_session() -> None:
    root = Path(__file__).parents[1]
    assert all((root / place).exists() for phase in PHASES for places in phase.values() for place in places)
    sessions = [arguments for phase in phases() for arguments in phase.values()]
    files = sorted(path.relative_to(root) for path in (root / "tests").rglob("test_*.py"))
    assert files
    for file in files:
        taken = [
            arguments
            for arguments in sessions
            if is_below(file, [one for one in arguments if not one.startswith("--")])
            and not is_below(file, [one.removeprefix("--ignore=") for one in arguments if one.startswith("--")])
        ]
        assert len(taken) == 1, f"{file} is run by {len(taken)} sessions"


def test_what_one_process_compiled_is_there_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps Python from writing that down would let each of hundreds of processes compile all of it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_given.py").write_text(
        "import os\n\ndef test(): assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"
    )
    assert run(["test_given.py"], tmp_path / "memory")[1] == 0


def test_what_collecting_made_is_not_looked_through_for_garbage_while_tests_run() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
