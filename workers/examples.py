"""Where the example policies and suites lie: inside this package once installed, in `deploy/` of a checkout."""

from pathlib import Path
from typing import Literal


def examples(kind: Literal["policies", "suites"]) -> Path:
    """Name the directory of the documents that `sluicegate demo` pushes.

    Raises:
        FileNotFoundError: neither place has it, so the installation is not whole.
    """
    here = Path(__file__).parent
    for place in (here / "deploy" / kind, here.parent / "deploy" / kind):
        if place.is_dir():
            return place
    message = f"no example {kind} in {here / 'deploy'} nor in {here.parent / 'deploy'}"
    raise FileNotFoundError(message)
