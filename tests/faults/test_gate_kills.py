"""A gate's runner is killed at random moments of its job: there is one result of it all the same."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from registry.failures import MAX_ATTEMPTS
from registry.service import Service
from schemas.bundle import Bundle
from schemas.policy import Policy
from tests.support.forked_runners import Runners, forked_runners
from tests.support.runners import Bench, bench, until
from workers.launchers.process import strays

SEED = int(os.environ.get("FAULT_SEED", "5"))
KILLS = int(os.environ.get("FAULT_KILLS", "20"))
NAMES = ("r1", "r2")
SPREAD_SECONDS = 1.6
"""About what such a job takes: a moment within it is one before, in or after any of its steps."""


def holder(made: Bench, runs: list[UUID], seen: set[UUID]) -> tuple[UUID, str] | None:
    """Return a run that is in its first attempt and was not looked at before, with the runner that has it."""
    for run in runs:
        if run not in seen and made.row(run).state == "claimed" and made.row(run).attempt == 1:
            name = made.run(run).runner
            assert name is not None
            return run, name
    return None


def engines_of(made: Bench) -> dict[str, set[str]]:
    """Return which runners have an engine of which job now."""
    found: dict[str, set[str]] = {}
    for folder in (made.folder / "runners").glob("*/engines/*"):
        if strays(folder):
            found.setdefault(folder.name, set()).add(folder.parts[-3])
    return found


def processes_of(folder: Path) -> list[str]:
    """Return every process that was started for a folder of these runners."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("HOME", ""):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def kill_one(
    made: Bench, runners: Runners, order: Callable[[], UUID], runs: list[UUID], seen: set[UUID], pause: float
) -> None:
    """Wait until a runner has taken a job, and kill it so much later, or as soon as the job is over.

    While one runner is looked at the other ends jobs unseen, so more are ordered when there are no others.
    """

    def taken() -> tuple[UUID, str] | None:
        if all(run in seen or made.row(run).state == "done" for run in runs):
            runs.append(order())
        return holder(made, runs, seen)

    run, name = until(taken, seconds=60, what="a job at its first attempt")
    seen.add(run)
    ends = time.monotonic() + pause
    while time.monotonic() < ends and made.row(run).state == "claimed":
        time.sleep(0.02)
    runners.kill(name)
    assert all(len(names) == 1 for names in engines_of(made).values())
    runners.start(name)


@pytest.mark.timeout(300)
def test_b63_a_runner_killed_at_any_moment_of_a_gate_leaves_one_result_and_no_process(
    service: Service, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    pauses = [chance.uniform(0.0, SPREAD_SECONDS) for _ in range(KILLS)]
    print(f"seed {SEED}: {[round(pause, 2) for pause in pauses]}")
    with bench(service, tmp_path) as made, forked_runners(made, tmp_path / "runners.log") as runners:
        bundle: Bundle = made.bundle()
        policy: Policy = made.policy()

        def order() -> UUID:
            return made.evaluate(bundle, policy)

        runs = [order() for _ in range(KILLS)]
        for name in NAMES:
            runners.start(name)
        seen: set[UUID] = set()
        for pause in pauses:
            kill_one(made, runners, order, runs, seen, pause)
        passed = 0
        for run in runs:
            done = made.done(run, seconds=90)
            told = made.entries(run)
            gates = Counter(entry.body["gate"] for entry in told if entry.kind == "gate_recorded")
            assert [entry.kind for entry in told].count("run_ended") == 1
            lost = [entry.body["problem"] for entry in told if entry.kind == "attempt_errored"]
            if done.outcome == "undecided":
                # A kill that came when its job was over met the next one, and this one at every attempt.
                assert lost == ["runner-lost"] * MAX_ATTEMPTS
                assert set(gates.values()) <= {1}
                continue
            assert done.outcome == "passed", done
            assert gates == {"compatibility": 1, "integrity": 1}
            assert lost == ["runner-lost"] * (done.attempt - 1)
            passed += 1
        assert passed >= KILLS // 2
        assert engines_of(made) == {}
        assert made.client().evidence.verify().verified
        # A kill meets no job when that was over before; most of them do.
        assert sum(made.row(run).attempt for run in runs) >= len(runs) + KILLS // 4
    assert until(lambda: processes_of(tmp_path) == [])
