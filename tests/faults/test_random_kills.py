"""Whole releases while processes are killed at random moments. The seed is printed, and chooses who and when.

`make test` runs one release of one seed; `make test-faults` more (FAULT_SEEDS=1,2,3 and FAULT_RELEASES=3 choose).
"""

import contextlib
import os
import random
import signal
import threading
import time
from uuid import UUID

import pytest

from schemas.problems import Problem
from schemas.release import TERMINAL, Phase, ReleaseDetail
from tests.support.ground import Ground

SEEDS = [int(seed) for seed in os.environ.get("FAULT_SEEDS", "1").split(",")]
RELEASES = int(os.environ.get("FAULT_RELEASES", "1"))
KILLS = 5
"""In each release."""
PARTS = ("api", "control", "runner", "beat", "valkey", "postgres", "envoy", "engine")
LONGEST_PAUSE_SECONDS = 2.5


class Reaper:
    """Kills so many processes, chosen with their moments by a generator, and says which."""

    def __init__(self, ground: Ground, chance: random.Random) -> None:
        self.ground = ground
        self.plan = [(chance.uniform(0.2, LONGEST_PAUSE_SECONDS), chance.choice(PARTS)) for _ in range(KILLS)]
        self.killed: list[str] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for pause, part in self.plan:
            time.sleep(pause)
            self.killed.append(part if self._kill(part) else f"({part})")

    def _kill(self, part: str) -> bool:
        if part == "engine":
            found = [*self.ground.engines("replicas").values(), *self.ground.engines("engines").values()]
            pid = found[-1][0].pid if found else None
        else:
            pid = self.ground.parts().get(part)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def ended(ground: Ground, release: UUID) -> ReleaseDetail:
    """Wait for the end of a release. Where it holds, because too much was killed, a person lets it go on."""
    ends = time.monotonic() + 150
    while (shown := ground.show(release)).phase not in {*TERMINAL, Phase.PROMOTED}:
        assert time.monotonic() < ends, (shown.phase, shown.held, shown.waits, [entry.act for entry in shown.log][-9:])
        if shown.held:
            print(f"it holds: {shown.held}")
            with contextlib.suppress(Problem):
                ground.client.releases.resume(release, "look again")
        time.sleep(0.2)
    return shown


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_whenever_a_release_comes_to_an_end_that_its_log_explains(ground: Ground, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(RELEASES):
        reaper = Reaper(ground, chance)
        print(f"seed {seed}: {reaper.plan}")
        with ground.traffic():
            release = ground.release()
            reaper.thread.start()
            shown = ended(ground, release)
            reaper.thread.join()
            ground.assert_sound(release)
        print(f"seed {seed}: killed {reaper.killed}; {shown.phase} because {shown.reason}")
        # A candidate without a fault is not blamed; it may be taken back when its replica, or a part of it, was killed.
        assert ground.show(release).phase in {Phase.PROMOTED, Phase.ROLLED_BACK}
