"""Tables on a terminal of 80 columns: nothing that is copied is broken, and nothing runs over."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime
from pathlib import Path

import pytest

from registry.cli.output import Output, lasted
from registry.cli.tables import BRIEF, abbreviated, fitted, shortened, widths
from registry.cli.targets import _show_served
from schemas.evidence import SplitEntry
from schemas.release import ServedAt
from schemas.short import apart
from tests.support.chain import write_bundle_directory

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "3c3aff2a" * 8
ID = "01a2289b-8894-74d9-8d4f-da769c0550b2"


def test_digests_and_ids_are_cut_to_what_commands_take_and_other_words_are_left():
    assert abbreviated(f"gemma {DIGEST} by {ID}") == "gemma 3c3aff2a3c3a by 01a2289b-8894"
    assert abbreviated("a" * 64) == "a" * 12
    for text in ("a" * 65, "chat@prod", "2026-11-29 22:00:00Z", "reason"):
        assert abbreviated(text) == text


def test_ids_that_begin_alike_are_cut_where_they_differ():
    same_millisecond, earlier = "01a2289b-8894-7000-8d4f-da769c0550b2", "01a2289b-1111-74d9-8d4f-da769c0550b2"
    rows = [[one, "many words of prose " * 9] for one in (ID, same_millisecond, earlier)]
    _, cells, _ = fitted(["ID", "WHY"], rows, 40)
    assert [row[0] for row in cells] == [ID[:18], same_millisecond[:18], earlier[:18]]
    # One that stands twice is one, and none is cut in the middle of what tells it apart.
    assert [row[0] for row in fitted(["ID", "WHY"], [rows[0], rows[0], rows[2]], 40)[1]] == [
        ID[:13],
        ID[:13],
        earlier[:13],
    ]
    assert apart([f"{ID[:35]}1", f"{ID[:35]}2"]) == 36
    assert apart([]) == 13


def test_a_table_that_fits_is_left_as_it_is():
    assert fitted(["A", "B"], [[DIGEST, "x"]], 100, ("B",)) == (["A", "B"], [[DIGEST, "x"]], [])


def test_a_table_that_does_not_fit_without_what_can_be_spared_is_told_row_by_row_and_nothing_is_left_out():
    columns, row = ["ID", "NAME", "MADE"], [ID, "n" * 20, "m" * 20]
    assert widths(columns, [row], 80) == [36, 20, 20]
    assert widths(columns, [row], 79) is None
    shown, cells, _ = fitted(columns, [row], 50, ("MADE",))
    assert widths(shown, cells, 50) is not None
    assert widths(shown, cells, 30) is None


def test_what_is_to_spare_goes_to_prose_and_words_and_times_stay_whole():
    columns, at, word = ["AT", "PLACE", "WHY"], "2026-11-29 22:00:00Z", "w" * 30
    rows = [[at, word, "many words of prose " * 9]]
    # All the terminal is used, and none is wider than what is in it.
    assert widths(columns, rows, 100) == [20, 30, 46]
    assert widths(columns, rows, 400) == [20, 30, 180]
    # Prose is squeezed before rows are told one below the other, but no further than a time is long.
    assert widths(columns, rows, 74) == [20, 30, 20]
    assert widths(columns, rows, 73) is None


def test_what_every_row_repeats_in_full_elsewhere_is_shown_by_its_beginning():
    long = "load errored: other processes used the machine meanwhile " * 4
    cut, was_cut = shortened(["A", "WHY"], [[long, long], ["x", "short"]], ("WHY",))
    assert was_cut
    assert cut[0][0] == long
    assert cut[0][1].endswith(" …")
    assert len(cut[0][1]) <= BRIEF
    assert cut[1] == ["x", "short"]
    assert shortened(["WHY"], [["short"]], ("WHY",)) == ([["short"]], False)


def test_columns_go_only_while_it_is_too_wide_and_in_the_order_given():
    columns, row = ["ID", "NAME", "MADE", "BY", "WHY"], [ID, "n" * 20, "m" * 20, "b" * 10, "many words of prose " * 9]
    assert fitted(columns, [row], 99, ("MADE", "BY"))[0] == columns
    shown, cells, gone = fitted(columns, [row], 80, ("MADE", "BY"))
    assert (shown, gone) == (["ID", "NAME", "BY", "WHY"], ["MADE"])
    assert cells == [[ID[:13], row[1], row[3], row[4]]]
    assert fitted(columns, [row], 30, ("MADE", "BY"))[2] == ["MADE", "BY"]
    assert fitted(columns, [], 10, ("BY",))[2] == ["BY"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0.0 s"), (0.04, "0.0 s"), (59.9, "59.9 s"), (75, "1 min 15 s"), (7260, "2 h 1 min"), (100_000, "1 d 3 h")],
)
def test_a_duration_is_told_in_units_that_suit_it(seconds, said):
    assert lasted(seconds) == said


def on_a_terminal(*commands: list[str]) -> list[str]:
    """What commands print on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = f"from registry.cli import main\nfor command in {commands}: main(command); print(end='\\f', flush=True)"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    ) as ran:
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(ours, 65536):
                said += chunk
        except OSError:  # Linux's way to say that nobody writes any more
            pass
        assert ran.wait(timeout=30) == 0
    os.close(ours)
    return said.decode().replace("\r\n", "\n").split("\f")[:-1]


def test_lists_fit_eighty_columns_and_what_they_show_can_be_used(scene):
    scene.target()
    release = scene.release("--reason", "a reason of many words that goes on, over the edge of any terminal")["id"]
    scene.to_canary(release)
    lists = [["release", "list"], ["bundle", "list"], ["target", "list"], ["runner", "list"], ["policy", "show"]]
    *listed, history, shown, bundle = on_a_terminal(
        *lists,
        ["target", "history", "chat@prod"],
        ["release", "show", release],
        ["bundle", "show", scene.bundle.digest],
    )
    for said in (*listed, history, shown):
        assert max(map(len, said.splitlines())) <= 80, said
    named, digest = listed[0].splitlines()[1].split()[0], listed[1].splitlines()[1].split()[1]
    assert scene.command.ok("release", "show", named, "--json").json["id"] == release
    assert scene.command.ok("bundle", "show", digest, "--json").json["digest"] == scene.bundle.digest
    # One row a change, without what can be spared, and what is left out is named.
    heading, newest, *_ = history.splitlines()
    assert heading.split() == ["AT", "SPLIT", "BY", "WHY"]
    assert newest[22:].startswith("10 % chat (")
    assert "approved: step 1 begins" in " ".join(history.split())
    # What is shown alone is whole, over the edge if it must: it is there to be copied.
    assert release in shown
    assert "AFTER" in shown
    assert scene.bundle.digest in bundle.replace("\n", "")


@pytest.mark.parametrize(
    ("weights", "said"),
    [((0, 10_000), " (accepted; 0 % of the traffic) since"), ((10_000, 0), " since")],
    ids=["none", "all"],
)
def test_what_was_accepted_and_had_no_traffic_is_said_below_what_had_it(weights, said, capsys):
    live, other = (f"sha256:{digit * 64}" for digit in "ab")
    at = datetime(2026, 11, 29, 10, tzinfo=UTC)
    split = [SplitEntry(bundle=bundle, weight_bp=weight) for bundle, weight in zip((live, other), weights, strict=True)]
    served = ServedAt(
        target="chat@prod", at=at, live_release=None, live_bundle=live, live_since=at, live_by="kim", live_reason=None,
        live_entry=None, split=split, split_since=at, split_entry=None,
    )  # fmt: skip
    _show_served(Output(as_json=False), served)
    told = " ".join(capsys.readouterr().out.split())
    assert f"live bundle {live}{said}" in told
    assert told.index("served") < told.index("live bundle")


def test_what_a_bundle_s_files_tell_fits_eighty_columns(tmp_path):
    folder = write_bundle_directory(tmp_path / "chain")
    identified = ["--engine-environment", "sha256:" + "e" * 64, "--engine-version", "1.0", "--dry-run"]
    (folder / "model.gguf").rename(folder / f"{'a-name-of-many-words-' * 2}q4.gguf")
    (said,) = on_a_terminal(["bundle", "create", str(folder), "--name", "a" * 60, *identified])
    told = said.partition("INFERRED")[2]
    assert "general.architecture" in told
    assert max(map(len, told.splitlines())) <= 80, told
