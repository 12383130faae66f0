"""Reads headers of weight files in a process that has 256 MB, and says how long each took.

    python -m tests.support.bounded_reader < names of files

For each line of stdin, a path, it prints a line: `read` or the code of the refusal, and seconds of processor time.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from gates.files.refusal import FileRefused
from gates.files.weights import header

MEMORY_BYTES = 256 * 1024 * 1024
ROOT = Path(__file__).parents[2]


class BoundedReader:
    """The process, from the outside."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bounded_reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=30)

    def read(self, path: Path) -> tuple[str, float]:
        """Return what became of a file, and how long it took; an ended process is an AssertionError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        said = self.process.stdout.readline().split()
        if not said:
            status = self._end()
            self._start()
            raise AssertionError(f"the reader ended with {status}")
        return said[0], float(said[1])


def main() -> None:
    """Answer until stdin ends. Whatever is no refusal ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        started = time.process_time()
        try:
            header(Path(line.strip()), keep=("tokenizer.ggml.tokens",))
            said = "read"
        except FileRefused as refused:
            said = refused.code
        print(said, time.process_time() - started, flush=True)


if __name__ == "__main__":
    main()
