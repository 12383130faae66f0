"""An engine that comes with relatives: a shell starts two more processes and then becomes the engine.

One has a session of its own, has gone to another folder and listens on a port; one ignores SIGTERM. As a program,
`python -m tests.support.family WORDS…` is `celery WORDS…` whose engines are such.
"""

import sys
from dataclasses import replace

from schemas.bundle import Bundle
from workers.engines.base import Command, Launch
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS

LISTENER = """
import os, pathlib, socket, time
home = pathlib.Path(os.environ["HOME"])
os.setsid()
os.chdir("/")
listening = socket.create_server(("127.0.0.1", 0))
(home / "relative.port").write_text(str(listening.getsockname()[1]))
time.sleep(600)
"""
STUBBORN = "trap '' TERM; while :; do sleep 1; done"
WRAPPER = f"""
"$1" -c '{LISTENER}' &
/bin/sh -c "{STUBBORN}" &
exec "$@"
"""


def _command(bundle: Bundle, launch: Launch) -> Command:
    command = LLAMACPP.command(bundle, launch)
    return replace(command, argv=("/bin/sh", "-c", WRAPPER, "wrapper", *command.argv))


FAMILY = replace(LLAMACPP, command=_command)


if __name__ == "__main__":
    from celery.__main__ import main  # after the engines were exchanged

    DRIVERS[FAMILY.name] = FAMILY
    sys.argv[0] = "celery"
    main()
