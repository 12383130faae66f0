"""A scripted engine beside the test, whose answer depends on the request's number: for the load gate."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

from tests.support import scripted_engine
from tests.support.scripted_engine import Script, ScriptedEngine

CHAT = "/v1/chat/completions"
_FACTS = {"build_info": "scripted", "model_path": "none", "total_slots": 4, "chat_template": ""}
_IDENTITY = {"/v1/models": Script.json({"data": [{"id": "scripted"}]}), "/props": Script.json(_FACTS)}


class _Numbered(dict[str, Script]):
    """Looks like scripts by path, and counts how often the chat path was asked for."""

    def __init__(self, choose: Callable[[int], Script]) -> None:
        super().__init__()
        self.choose = choose
        self.asked = 0

    @overload
    def get(self, key: str, default: None = None, /) -> Script | None: ...
    @overload
    def get(self, key: str, default: Script, /) -> Script: ...
    @overload
    def get(self, key: str, default: Any, /) -> Any: ...
    def get(self, key: str, default: Any = None, /) -> Any:
        if key != CHAT:
            return _IDENTITY.get(key, default)
        self.asked += 1
        return self.choose(self.asked - 1)


@contextmanager
def load_engine(choose: Callable[[int], Script]) -> Iterator[ScriptedEngine]:
    """Run a scripted engine in a thread; `choose` gives the script of the n-th chat request, warm-up included."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[ScriptedEngine] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with scripted_engine.scripted_engine() as engine:
            engine.scripts = _Numbered(choose)
            found.append(engine)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the scripted engine did not start")
    try:
        yield found[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
