"""The driver of an engine in two processes; what it starts is `tests.support.split_server`."""

import json
import sys
from dataclasses import replace

from schemas.bundle import Bundle
from tests.support import split_server
from workers.engines.base import Command, Driver, Launch
from workers.engines.llamacpp import LLAMACPP


def split(
    *,
    exits: float | None = None,
    token_seconds: float = 0.0,
    lines: tuple[str, ...] = (),
    context: int | None = None,
    props: dict[str, object] | None = None,
) -> Driver:
    """Return the driver of such an engine.

    Args:
        exits: seconds after which the web process follows the engine behind it, with status 0; never when None.
        token_seconds: what a token takes.
        lines: written to the log before it listens.
        context: what it says of its context; as declared unless given.
        props: what it says of itself.
    """

    def command(bundle: Bundle, launch: Launch) -> Command:
        told = {
            "model": bundle.serving.served_name,
            "context": context or bundle.runtime.context_tokens,
            "port_file": str(launch.port_file),
            "exits": exits,
            "token_seconds": token_seconds,
            "lines": lines,
            "props": props or {},
        }
        words = (sys.executable, "-I", split_server.__file__, json.dumps(told))
        return Command(argv=words, port_file=launch.port_file)

    return replace(
        LLAMACPP,
        command=command,
        rank_pattern=split_server.TITLE,
        progress_patterns=(r"shards: +(?P<percent>\d+)%",),
        compile_pattern=r"compiling took (?P<seconds>[0-9.]+) s",
    )
