"""Names of modules, and patterns of them, as quantization configurations write them; they come from outside.

A pattern that could be read in very many ways is none, and all patterns of a configuration together get a bounded time.

Source: compressed-tensors 0.17 (`re:` and a regular expression), ModelOpt (stars), GPTQModel, AutoAWQ and transformers
(parts of names).
"""

import re
import time
from collections.abc import Iterable
from functools import lru_cache

MOST_SECONDS = 4.0
"""Processor time for all patterns of one configuration; those of the largest published models take a tenth of it."""
_LETTERS = 400
_NAME_LETTERS = 256
"""Of a name that is held against regular expressions; the longest of published models have half as many."""
_KEPT = 8192
_LAZY = re.compile(r"([*+?}])[?+]")
_NUMBER = re.compile(r"(\[0-9\]|\\d)[*+](?=\\\.|\.[A-Za-z_]|\$?\Z)")
_MOST_REPETITIONS = 3


class Patience:
    """Processor time that is left for patterns. When it is spent nothing matches any more, and `is_spent` says so."""

    def __init__(self) -> None:
        self.seconds = self.left = MOST_SECONDS

    @property
    def is_spent(self) -> bool:
        """Whether patterns were left untried."""
        return self.left <= 0


class Patterns:
    """Several names and patterns, of which one has to match.

    Args:
        patterns: whole names, parts of names between dots, names with stars, or `re:` and a regular expression that
            matches from the beginning.
        patience: shared with others of the same configuration.
    """

    def __init__(self, patterns: Iterable[str], patience: Patience) -> None:
        told = list(dict.fromkeys(patterns))
        self._patience = patience
        self._regular = [one[3:] for one in told if one.startswith("re:")]
        self._starred = [one for one in told if "*" in one and not one.startswith("re:")]
        plain = [one for one in told if "*" not in one and not one.startswith("re:")]
        self._parts = frozenset(plain)
        self._most_dots = max((one.count(".") for one in plain), default=-1)
        self._empty = not told

    def match(self, module: str) -> bool:
        """Say whether a module is named."""
        if self._empty or self._patience.is_spent:
            return False
        if self._is_part(module):
            return True
        if not self._regular and not self._starred:
            return False
        start = time.thread_time()
        found = any(_is_like(one, module) for one in self._starred) or self._is_regular(module)
        self._patience.left -= time.thread_time() - start
        return found

    def _is_part(self, module: str) -> bool:
        """Say whether a plain name is the module's, or some of its words in a row."""
        if not self._parts:
            return False
        words = module.split(".")
        longest = self._most_dots + 1
        return module in self._parts or any(
            ".".join(words[first:last]) in self._parts
            for first in range(len(words))
            for last in range(first + 1, min(first + longest, len(words)) + 1)
        )

    def _is_regular(self, module: str) -> bool:
        if len(module) > _NAME_LETTERS:
            return False
        limit = time.thread_time() + self._patience.left
        for text in self._regular:
            compiled = _compiled(text)
            if compiled is not None and compiled.match(module) is not None:
                return True
            if time.thread_time() > limit:
                return False  # thousands of patterns; the time is counted by whoever asked
        return False


def _is_like(pattern: str, module: str) -> bool:
    """Tell whether a name is like a pattern of stars; the first place of each part will do, so it takes no time."""
    first, *middle, last = pattern.split("*")
    if len(first) + len(last) > len(module) or not (module.startswith(first) and module.endswith(last)):
        return False
    place, end = len(first), len(module) - len(last)
    for part in middle:
        found = module.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


@lru_cache(maxsize=_KEPT)
def _compiled(text: str) -> re.Pattern[str] | None:
    """Return a regular expression; None for one that could run for long: no group is repeated, and little else is.

    Each repetition may end anywhere and is tried anew for each end of those before it. One at the end is not, nor is
    a number that a dot ends.
    """
    if len(text) > _LETTERS or re.search(r"\)[*+{?]", text):
        return None
    counted = _NUMBER.sub("0", _LAZY.sub(r"\1", text.replace("(?:", "(")))
    ways = [counted] if "(" in counted else counted.split("|")
    if any(sum(map(one.removesuffix("$").removesuffix(".*").count, "*+?{")) > _MOST_REPETITIONS for one in ways):
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        return None
