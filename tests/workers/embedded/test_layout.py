import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.embedded.layout import DataRefused, Layout

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout(tmp_path):
    made = Layout(tmp_path / "data")
    made.prepare()
    return made


def test_a_data_directory_is_for_its_owner_alone(layout):
    folders = [layout.root, *(path for path in layout.root.iterdir() if path.is_dir())]
    assert len(folders) > 5
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    mode = tmp_path.stat().st_mode
    with pytest.raises(DataRefused, match="holds something else") as caught:
        Layout(tmp_path).prepare()
    assert caught.value.status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert tmp_path.stat().st_mode == mode


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "sluicegate.dev/data/v9"}'])
def test_data_in_another_form_are_refused(layout, text):
    (layout.root / "sluicegate.json").write_text(text)
    with pytest.raises(DataRefused, match="another form"):
        layout.prepare()


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null", "/dev/null/data"])
def test_a_place_where_nothing_can_be_made_is_refused_with_a_hint(place):
    with pytest.raises(DataRefused, match="name another one with --data"):
        Layout(Path(place)).prepare()


def test_a_secret_is_made_once_and_kept_to_its_owner(layout):
    first = layout.secret("admin.token", prefix="slg_")
    assert first.startswith("slg_")
    assert len(first) > 40
    assert layout.secret("admin.token", prefix="slg_") == first
    assert layout.secret("other") != first
    assert (layout.secrets / "admin.token").stat().st_mode & 0o777 == 0o600


def test_sockets_lie_in_the_data_directory_while_its_path_is_short():
    assert Layout(Path("/var/lib/a b/data")).run == Path("/var/lib/a b/data/run")


@pytest.mark.parametrize("name", ["d" * 120, "a,b", "it's", "ü" * 60])
def test_sockets_lie_in_a_short_private_folder_where_the_path_would_not_do(tmp_path, name):
    layout = Layout(tmp_path / name)
    layout.prepare()
    try:
        assert layout.run.parent == Path("/tmp")
        assert len(os.fsencode(layout.sockets / ".s.PGSQL.5432.lock")) < 107
        assert layout.run.stat().st_mode & 0o777 == 0o700
        assert Layout(tmp_path / name).run == layout.run
        assert Layout(tmp_path / f"{name}2").run != layout.run
    finally:
        layout.run.rmdir()


def test_a_folder_of_sockets_that_somebody_else_put_there_is_refused(tmp_path):
    layout = Layout(tmp_path / ("d" * 120))
    layout.run.symlink_to(tmp_path)
    try:
        with pytest.raises(DataRefused, match="not a folder of this user"):
            layout.prepare()
    finally:
        layout.run.unlink()


def test_one_process_holds_a_data_directory_and_a_second_is_told_which(layout):
    second = Layout(layout.root)
    with (
        layout.held(),
        pytest.raises(DataRefused, match=f"in use by the process {os.getpid()}; end ") as caught,
    ):
        second.held().__enter__()
    assert caught.value.status == 4
    with second.held():
        pass


def test_a_killed_holder_holds_nothing(layout):
    script = """
import os, sys
from pathlib import Path
from workers.embedded.layout import Layout
with Layout(Path(sys.argv[1])).held():
    os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", script, layout.root], env=environment, check=False)
    assert killed.returncode == -9
    assert (layout.root / "lock").read_text().strip().isdigit()
    with layout.held():
        assert (layout.root / "lock").read_text() == f"{os.getpid()}\n"
