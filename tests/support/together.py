"""Does several things at the same moment, each in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Any


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Start all acts at once and return, in their order, what each returned or the exception it ended with."""
    outcomes: list[Any] = [None] * len(acts)
    barrier = threading.Barrier(len(acts))

    def run(place: int, act: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            outcomes[place] = act()
        except BaseException as error:  # edge: whoever started the threads looks at how each ended
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
