"""Whose processor time is whose, on this machine and with real processes."""

import os
import subprocess
import sys
import time

import pytest

from gates.machine import Processors, together

BUSY = "import time; ends = time.monotonic() + 30\nwhile time.monotonic() < ends: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.fixture(params=[BUSY, PARENT], ids=["itself", "by a child"])
def busy(request):
    process = subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True)
    time.sleep(0.3)
    yield process.pid
    os.killpg(process.pid, 9)
    process.wait()


@pytest.fixture
def idle():
    process = subprocess.Popen(["sleep", "30"])
    yield process.pid
    process.kill()
    process.wait()


def test_the_time_of_a_busy_process_is_the_engines_when_it_is_the_engine_and_foreign_when_not(busy, idle):
    before = [Processors.look(engines=(pid,), own=()) for pid in (busy, idle)]
    time.sleep(1)
    engine, other = (
        Processors.look(engines=(pid,), own=()).since(each) for pid, each in zip((busy, idle), before, strict=True)
    )
    assert engine["engine_us"] > 100_000  # it may have to share the processors with whatever else runs here
    assert engine["busy_us"] >= 0.8 * engine["engine_us"]
    assert other["engine_us"] < 50_000
    assert other["busy_us"] - other["engine_us"] > 100_000
    assert engine["wall_us"] >= 1_000_000
    assert engine["cores"] == os.cpu_count()


def test_what_we_use_ourselves_is_ours():
    before = Processors.look(engines=(None,), own=(os.getpid(),))
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    found = Processors.look(engines=(None,), own=(os.getpid(),)).since(before)
    assert found["own_us"] > 250_000
    assert found["engine_us"] is None


def test_an_engine_that_is_gone_has_no_known_time():
    process = subprocess.Popen([sys.executable, "-c", ""])
    before = Processors.look(engines=(process.pid,), own=())
    process.wait()
    assert Processors.look(engines=(process.pid,), own=(process.pid,)).since(before)["engine_us"] is None


def test_the_times_of_several_engines_are_added_and_so_are_parts_of_a_measurement(busy, idle):
    first = Processors.look(engines=(busy, idle), own=())
    time.sleep(0.3)
    second = Processors.look(engines=(busy, idle), own=())
    time.sleep(0.3)
    parts = [second.since(first), Processors.look(engines=(busy, idle), own=()).since(second)]
    whole = together(parts)
    assert whole["engine_us"] == parts[0]["engine_us"] + parts[1]["engine_us"] > 0
    assert whole["wall_us"] == parts[0]["wall_us"] + parts[1]["wall_us"]
    assert whole["cores"] == os.cpu_count()
    assert together([parts[0], parts[1] | {"engine_us": None}])["engine_us"] is None
    assert Processors.look(engines=(), own=()).engine_seconds is None
