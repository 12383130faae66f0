"""Remembers what a mutation run has tried, so that the next one neither repeats it nor searches long."""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Change(Protocol):
    """What is remembered of a mutant."""

    @property
    def module(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def was(self) -> str: ...
    @property
    def now(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trial ended. `by` is the first test that failed; None where none did: all passed, the module could not be
    imported, or the process was ended for using too much."""

    is_noticed: bool
    by: str | None


def loaded_digest(root: Path) -> str:
    """Return the SHA-256 of every source of this repository that this process has loaded, and of pytest's options.

    Sources of an environment inside the repository are left out: their names begin with a dot.
    """
    names = {"pyproject.toml"}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(root) and not path.relative_to(root).parts[0].startswith("."):
            names.add(str(path.relative_to(root)))
    whole = hashlib.sha256()
    for name in sorted(names):
        whole.update(f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


class Tried:
    """Outcomes by mutant, of this run and of those whose file it goes on with.

    An outcome counts again only while both are as they were: the whole mutated module, and everything else that its
    tests load. The name of the test that noticed is of use for longer: it is tried first.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        self._noticed_by: dict[tuple[str, str, str], str] = {}
        self._near: dict[tuple[str, str], list[str]] = defaultdict(list)
        for line in path.read_text("utf-8").splitlines() if path is not None and path.exists() else ():
            told = json.loads(line)
            self._remember(told["key"], tuple(told["mutant"]), Outcome(told["is_noticed"], told["by"]))

    def outcome(self, mutant: Change, digest: str) -> Outcome | None:
        """Return how this very mutant ended against the tests with this digest, or None if it was not tried."""
        return self._outcomes.get(_key(mutant, digest))

    def likely(self, mutant: Change) -> Sequence[str]:
        """Return the tests that noticed this change before, or another one of the same line; the likeliest first."""
        itself = self._noticed_by.get((mutant.module, mutant.was, mutant.now))
        near = reversed(self._near[mutant.module, mutant.was])
        return list(dict.fromkeys([*([itself] if itself else []), *near]))

    def keep(self, mutant: Change, digest: str, outcome: Outcome) -> None:
        """Remember how a trial ended; at once in the file, since a run may be stopped."""
        key, name = _key(mutant, digest), (mutant.module, mutant.was, mutant.now)
        self._remember(key, name, outcome)
        if self._path is not None:
            told = {"key": key, "mutant": name, "is_noticed": outcome.is_noticed, "by": outcome.by}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")

    def _remember(self, key: str, name: tuple[str, str, str], outcome: Outcome) -> None:
        self._outcomes[key] = outcome
        if outcome.by is not None:
            self._noticed_by[name] = outcome.by
            near = self._near[name[:2]]
            if outcome.by in near:
                near.remove(outcome.by)
            near.append(outcome.by)


def _key(mutant: Change, digest: str) -> str:
    return hashlib.sha256(f"{digest} {mutant.module}\n{mutant.source}".encode()).hexdigest()
