"""Why an engine ended, by its exit, its log and the kernel's counters."""

import os
from pathlib import Path

import pytest

from schemas.failures import FAILURES, Cause, is_final, is_transient
from workers.diagnosis import LoadProgress, classify, memory_kills
from workers.engines.table import DRIVERS
from workers.launchers.base import Condition, ProcessState


def cause(code: int | None, *lines: str, short: bool = False, patterns: tuple[tuple[str, str], ...] = ()) -> Cause:
    return classify(ProcessState(Condition.EXITED, code), lines, patterns, was_short_of_memory=short)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "exited"),
        (1, "exited"),
        (None, "exited"),
        (-9, "killed"),
        (137, "killed"),
        (-15, "killed"),
        (-11, "crashed"),
        (134, "crashed"),
        (-7, "crashed"),
        (-4, "missing_kernel"),
        (-31, "crashed"),
        (255, "exited"),
    ],
)
def test_without_a_word_in_its_log_an_end_is_told_by_its_status(code, expected):
    assert cause(code, "as ever") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out_of_memory"),
        ("CUDA error: no kernel image is available for execution on the device", "missing_kernel"),
        ("ImportError: _C.abi3.so: undefined symbol: _ZN3c104cuda", "missing_kernel"),
        ("size mismatch for model.embed_tokens.weight: copying a param", "shape_mismatch"),
        ("tensor 'blk.0.attn_q.weight' has wrong shape; expected 64, 64, got 64, 32", "shape_mismatch"),
        ("api_server.py: error: unrecognized arguments: --bogus", "bad_argument"),
    ],
)
def test_what_engines_of_any_kind_write_names_the_cause(line, expected):
    assert cause(1, "loading", line, "bye") == expected


def test_a_driver_s_own_patterns_come_first_and_a_kill_from_outside_before_all():
    patterns = (("failed to load", "weights_unreadable"),)
    lines = ("failed to load: out of memory",)
    assert cause(1, *lines, patterns=patterns) == "weights_unreadable"
    assert cause(-9, *lines, patterns=patterns) == "killed"
    assert cause(-9, *lines, patterns=patterns, short=True) == "out_of_memory"
    assert cause(1, "as ever", short=True) == "exited"
    known = ProcessState(Condition.EXITED, 1, "evicted", "disk_full")
    assert classify(known, lines, patterns, was_short_of_memory=False) == "disk_full"


def test_every_cause_that_a_driver_names_is_one_and_none_is_both_passing_and_final():
    for driver in DRIVERS.values():
        assert {named for _, named in driver.failure_patterns} <= set(Cause)
    assert list(FAILURES) == list(Cause)
    assert not [one for one in Cause if is_transient(one) and is_final(one)]
    assert not is_transient(None)
    assert not is_final(None)


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/kube/pod", "kube/pod/memory.events", "low 0\nhigh 0\nmax 4\noom 3\noom_kill 2\n"),
        ("9:memory:/docker/x", "memory/docker/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_the_kernel_s_kills_for_lack_of_memory_are_read_from_either_kind_of_group(tmp_path, line, file, text):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(f"11:cpu,cpuacct:/\n{line}\n")
    assert memory_kills(7, proc=proc, groups=groups) is None
    place = groups / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert memory_kills(7, proc=proc, groups=groups) == 2
    assert memory_kills(8, proc=proc, groups=groups) is None


def test_the_counter_of_this_very_process_is_a_number_or_is_not_there():
    seen = memory_kills(os.getpid())
    assert seen is None or seen >= 0


def test_how_far_it_has_loaded_is_read_as_the_log_grows(tmp_path: Path):
    log = tmp_path / "engine.log"
    patterns = (r"shards: +(?P<percent>\d+)%", r"loaded (?P<done>\d+) of (?P<total>\d+) tensors")
    progress = LoadProgress(log, patterns)
    assert progress.percent() is None
    log.write_text("starting\nshards:   0%|   | 0/4\rshards:  25%|#  | 1/4\rshards:  5")
    assert progress.percent() == 25
    with log.open("a") as file:
        file.write("0%|## | 2/4\r")
    assert progress.percent() == 50
    assert progress.percent() is None
    with log.open("a") as file:
        file.write("loaded 3 of 4 tensors\n")
    assert progress.percent() == 75
    with log.open("a") as file:
        file.write("loaded 0 of 0 tensors\n")
    assert progress.percent() == 0
    assert LoadProgress(log, ()).percent() is None
