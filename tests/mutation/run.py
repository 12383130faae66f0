"""Are the tests of what decides able to fail? Changes each of its decisions once, and looks whether a test does.

    python -m tests.mutation.run --mutants PYTHON [--jobs N] [--resume FILE] [MODULE_FILE…]

`--mutants` is the interpreter of the environment that has cosmic-ray. A mutant survives when every test of its module
still passes. Exit status 1: a survivor is not in `equivalent.toml`, or an entry of that list is no survivor any more.
With `--resume` a run that was stopped goes on where it was, see `tests.mutation.tried`.

One process imports what is slow to import and not under test; each mutant is a fork of it, whose import system gives
the mutated source in place of the module, and which ends with the first test that fails. Nothing is written, so that
nothing is left behind.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, NoReturn

from tests.mutation.tried import Outcome, Tried, loaded_digest

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
TESTS: Final = {
    "gates/stats.py": ("tests/gates/test_stats.py",),
    "gates/policy.py": ("tests/gates/test_policy.py",),
    "registry/lifecycle.py": ("tests/registry/test_lifecycle.py",),
    "gates/canary.py": ("tests/gates/test_canary.py",),
    "gates/load_judgement.py": tuple(
        f"tests/gates/test_load_{name}.py" for name in ("thresholds", "judgement", "machine")
    ),
    "gates/tally.py": ("tests/gates/test_tally.py", "tests/gates/test_canary.py"),
}
"""What decides, and the tests that must notice."""
SLOW: Final = (
    *("hypothesis", "hypothesis.strategies", "numpy", "pydantic", "pytest", "rfc8785", "scipy.special", "scipy.stats"),
    *("schemas.evidence", "schemas.policy", "schemas.release", "schemas.result", "schemas.suite"),
)
"""Imported once, before the forks. `schemas` imports nothing of what is changed."""
LEAST_SECONDS: Final = 1.0
SLACK: Final = 3.0
"""A mutant under which a test, or all of them, use so many times their time without it, and at least so many seconds of
a processor, is in an endless loop, and noticed."""
WALL_SECONDS: Final = 600.0
"""The same for one that sleeps for ever."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module. `was` and `now` are the lines that differ, without the space around them."""

    module: str
    operator: str
    line: int
    source: str
    was: str
    now: str

    @property
    def key(self) -> tuple[str, str, str]:
        """How `equivalent.toml` names it: by what the lines say, since their numbers move."""
        return self.module, self.was, self.now

    def diff(self) -> str:
        """Return the change as a unified diff."""
        before = (ROOT / self.module).read_text("utf-8").splitlines(keepends=True)
        after = self.source.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.module, f"{self.module} ({self.operator})", n=2))


@dataclass(slots=True)
class Running:
    """A fork that tries one mutant."""

    mutant: Mutant | None
    pid: int
    told: IO[bytes]
    began: float = field(default_factory=time.monotonic)
    used_seconds: float = 0.0

    def said(self) -> dict[str, Any]:
        """Return what the fork told before it ended; nothing when it was killed."""
        with self.told:
            self.told.seek(0)
            told: dict[str, Any] = json.loads(self.told.read() or b"{}")
        return told


@dataclass(frozen=True, slots=True)
class Baseline:
    """The tests of a module without any mutant: processor seconds of all, seconds of each, and what they load."""

    seconds: float
    each: dict[str, float]
    digest: str

    def order(self, first: Sequence[str]) -> list[str]:
        """Return the names of the tests, cheapest first, but for those that come before all."""
        return [*first, *sorted(self.each, key=self.each.__getitem__)]


class _Watch:
    """A plugin of pytest: runs the tests in a given order, tells which failed first, and keeps how long each took.

    A test that uses far more time than it did before ends the process.
    """

    def __init__(self, base: Baseline, first: Sequence[str], failed: Callable[[str], None]) -> None:
        self.places = {name: place for place, name in reversed(list(enumerate(base.order(first))))}
        self.base = base
        self.failed = failed
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        seconds = self.base.each.get(nodeid)
        signal.setitimer(signal.ITIMER_VIRTUAL, max(LEAST_SECONDS, SLACK * seconds) if seconds is not None else 0.0)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.places.get(item.nodeid, len(self.places)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed(report.nodeid)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a source of its own for one module."""

    def __init__(self, module: str, source: str) -> None:
        self.name = module.removesuffix(".py").replace("/", ".")
        self.path = str(ROOT / module)
        self.source = source

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.path)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def mutants(python: str, modules: Sequence[str]) -> list[Mutant]:
    """Return every mutant of the modules."""
    words = [python, "-W", "ignore", str(HERE / "mutants.py"), str(ROOT), *modules]
    written = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    found = []
    for line in written.stdout.splitlines():
        made: dict[str, Any] = json.loads(line)
        was, now = _changed((ROOT / made["module"]).read_text("utf-8"), made["source"])
        found.append(Mutant(was=was, now=now, **made))
    return found


def _changed(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return tuple(  # type: ignore[return-value]
        " ".join(" ".join(line[2:] for line in lines if line.startswith(mark)).split()) for mark in ("- ", "+ ")
    )


def _import_once() -> None:
    """Import what every fork needs and none changes, pytest's parts among it."""
    default_plugins = importlib.import_module("_pytest.config").default_plugins
    for name in (*SLOW, *(f"_pytest.{name}" for name in default_plugins)):
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()


def _start(mutant: Mutant | None, tests: Sequence[str], base: Baseline, first: Sequence[str] = ()) -> Running:
    sys.stdout.flush()
    told = tempfile.TemporaryFile()  # noqa: SIM115 - `Running.said` closes it
    pid = os.fork()
    if pid:
        return Running(mutant, pid, told)

    def end(status: int, **said: object) -> NoReturn:
        told.write(json.dumps(said).encode())
        told.flush()
        os._exit(status)

    with contextlib.suppress(BaseException):  # edge: a fork ends here, whatever the mutant raised
        limit = math.ceil(max(LEAST_SECONDS, SLACK * base.seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        # What pytest does after a failure takes longer than the test did.
        watch = _Watch(base, first, failed=lambda name: end(1, by=name))
        status = _try(mutant, tests, watch)
        if mutant is None:
            end(status, each=watch.seconds, digest=loaded_digest(ROOT))
        end(status)
    os._exit(70)


def _try(mutant: Mutant | None, tests: Sequence[str], watch: _Watch) -> int:
    """Run the tests in this process, silently; 0 when all pass."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if mutant is not None:
        sys.meta_path.insert(0, _Mutated(mutant.module, mutant.source))
    pytest = importlib.import_module("pytest")
    hypothesis = importlib.import_module("hypothesis")
    # The same examples every time: the list of equivalent mutants must not depend on luck.
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=30,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # nobody reads the example
    )
    hypothesis.settings.load_profile("mutation")
    words = [
        "-x",
        "-q",
        "--tb=no",
        "--assert=plain",
        "--noconftest",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=0",
    ]
    return int(pytest.main([*words, *tests], plugins=[watch]))


def _ended(running: list[Running]) -> Iterator[tuple[Running, bool]]:
    """Yield what has ended, with whether its tests passed."""
    for each in list(running):
        pid, status, used = os.wait4(each.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() - each.began < WALL_SECONDS:
            continue
        if pid == 0:
            os.kill(each.pid, signal.SIGKILL)
            _, status, used = os.wait4(each.pid, 0)
        each.used_seconds = used.ru_utime + used.ru_stime
        running.remove(each)
        yield each, status == 0


def baseline(module: str) -> Baseline:
    """Run a module's tests without any mutant. Raises RuntimeError when they fail."""
    running = [_start(None, TESTS[module], Baseline(WALL_SECONDS, {}, ""))]
    while True:
        for each, passed in _ended(running):
            said = each.said()
            if not passed:
                raise RuntimeError(f"the tests of {module} fail without any mutant: {said.get('by') or 'none ran'}")
            return Baseline(each.used_seconds, said["each"], said["digest"])
        select.select([], [], [], 0.02)


def survivors(found: Sequence[Mutant], *, jobs: int, tried: Tried, told: Callable[[Mutant], None]) -> list[Mutant]:
    """Return the mutants that no test noticed, in order; `told` hears of each at once."""
    bases = {module: baseline(module) for module in {each.module for each in found}}
    waiting, running, alive, done = list(reversed(found)), list[Running](), list[Mutant](), 0

    def ended(mutant: Mutant, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if not outcome.is_noticed:
            alive.append(mutant)
            told(mutant)
        if done % 50 == 0:
            sys.stderr.write(f"{done} of {len(found)} tried, {len(alive)} not noticed\n")

    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            base = bases[mutant.module]
            if known := tried.outcome(mutant, base.digest):
                ended(mutant, known)
                continue
            running.append(_start(mutant, TESTS[mutant.module], base, tried.likely(mutant)))
        for each, passed in _ended(running):
            if each.mutant is not None:
                outcome = Outcome(is_noticed=not passed, by=each.said().get("by"))
                tried.keep(each.mutant, bases[each.mutant.module].digest, outcome)
                ended(each.mutant, outcome)
        if running:
            select.select([], [], [], 0.01)
    return sorted(alive, key=lambda each: (each.module, each.line, each.operator))


def accepted() -> dict[tuple[str, str, str], str]:
    """Return the mutants that change no decision, with the reason of each."""
    listed = tomllib.loads((HERE / "equivalent.toml").read_text("utf-8")).get("mutant", [])
    return {(each["module"], each["was"], each["now"]): each["reason"] for each in listed}


def main(arguments: Sequence[str]) -> int:
    """Try every mutant and say which were not noticed."""
    parser = argparse.ArgumentParser(description="Changes each decision once and looks whether a test notices.")
    parser.add_argument("--mutants", required=True, help="interpreter of the environment that has cosmic-ray")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="forks at once")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keeps what was tried, and goes on from there")
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all of them by default")
    told = parser.parse_args(arguments)
    if unknown := [each for each in told.modules if each not in TESTS]:
        parser.error(f"no tests are known for {', '.join(unknown)}")
    modules = told.modules or list(TESTS)
    tried = Tried(told.resume and told.resume.absolute())
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    _import_once()
    began = time.monotonic()
    found = mutants(told.mutants, modules)
    equivalent = accepted()

    def tell(mutant: Mutant) -> None:
        if mutant.key not in equivalent:
            sys.stdout.write(f"\nnot noticed: {mutant.module}:{mutant.line} {mutant.operator}\n{mutant.diff()}")
            sys.stdout.flush()

    alive = survivors(found, jobs=told.jobs, tried=tried, told=tell)
    unknown_ones = [each for each in alive if each.key not in equivalent]
    stale = [key for key in equivalent if key[0] in modules and key not in {each.key for each in alive}]
    for module, was, now in stale:
        sys.stdout.write(f"\nlisted as equivalent, but noticed or not made: {module}\n- {was}\n+ {now}\n")
    sys.stdout.write("\n")
    for module in modules:
        made, left, new = (Counter(each.module for each in some)[module] for some in (found, alive, unknown_ones))
        sys.stdout.write(
            f"{module}: {made} mutants, {made - left} noticed, {left - new} equivalent, {new} not noticed\n"
        )
    sys.stdout.write(f"{time.monotonic() - began:.0f} s, {len(stale)} entries of the list are stale\n")
    return 1 if unknown_ones or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
