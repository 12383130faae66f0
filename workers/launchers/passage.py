"""Passes bytes between a port of a loopback and a socket in a folder: the only way into a container without a network.

    python3 -I -S passage.py inside SOCKET PORT PROGRAM ARGUMENT…
    python3 -I -S passage.py outside FOLDER NAME TOLD [PARENT]

Inside, it listens on SOCKET, passes what comes on to PORT of the container's loopback, and becomes the program, which
so is the one that signals reach and whose end is the container's. Outside, it listens on a port of the machine's
loopback that it writes into the file TOLD, passes what comes on to the socket NAME in FOLDER, and ends when that folder
is gone, or when PARENT is. Standard library only: the inner one runs in the image's Python, 3.9 or later.

A connection that one side ends is ended on the other, in the same direction, so an engine sees that its client went.
"""

from __future__ import annotations  # so that an older Python reads what it does not know

import asyncio
import functools
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

BACKLOG = 1024
LOOK_SECONDS = 0.5
LOOPBACK = "127.0.0.1"


class End(asyncio.Protocol):
    """One end of a connection: what it reads is written to the other one, no faster than that takes it."""

    def __init__(self) -> None:
        self.other: End | None = None
        self.transport: asyncio.Transport | None = None
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport  # type: ignore[assignment]  # a stream's transport is a Transport

    @property
    def beyond(self) -> asyncio.Transport:
        """Where what is read here goes; nothing is read before it is there."""
        if self.other is None or self.other.transport is None:
            raise RuntimeError("it is read from before there is another end")
        return self.other.transport

    def data_received(self, data: bytes) -> None:
        """Pass on."""
        self.beyond.write(data)

    def eof_received(self) -> bool:
        """Pass on that nothing more comes from here; the other direction may go on."""
        self.is_over = True
        if self.other is None or self.other.is_over:
            return False
        self.beyond.write_eof()
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        """End the other side too, after what it still has to write."""
        self.is_over = True
        if self.other is not None:
            self.beyond.close()

    def pause_writing(self) -> None:
        """Read no more on the other side while this one does not get rid of what it has."""
        self.beyond.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self.beyond.resume_reading()


Made = Callable[[], End]
Connect = Callable[[Made], Awaitable["tuple[asyncio.Transport, End]"]]


class Accepted(End):
    """The end that was connected to: the other one is made for it, or it is cut."""

    def __init__(self, connect: Connect) -> None:
        super().__init__()
        self._connect = connect
        self._meeting: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the other end, and read nothing before."""
        super().connection_made(transport)
        if self.transport is not None:
            self.transport.pause_reading()
            self._meeting = asyncio.ensure_future(self._meet(self.transport))

    async def _meet(self, transport: asyncio.Transport) -> None:
        try:
            _, other = await self._connect(End)
        except OSError:
            # A reset, as from a port that nobody listens on, and no answer that ended before it began.
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
            return
        self.other, other.other = other, self
        if self.is_over:
            self.beyond.close()
        else:
            transport.resume_reading()


async def to_port(port: int, made: Made) -> tuple[asyncio.Transport, End]:
    """Connect to a port of the loopback."""
    return await asyncio.get_running_loop().create_connection(made, LOOPBACK, port)


async def to_socket(folder: str, name: str, made: Made) -> tuple[asyncio.Transport, End]:
    """Connect to a socket in a folder that others write to: to one that is there, and nowhere that a link leads."""
    place = os.open(Path(folder) / name, os.O_PATH | os.O_NOFOLLOW)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise OSError("it is no socket")
        loop, sock = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # noqa: FBT003 - it takes no name
        try:
            await loop.sock_connect(sock, f"/proc/self/fd/{place}")
            return await loop.create_unix_connection(made, sock=sock)
        except OSError:
            sock.close()
            raise
    finally:
        os.close(place)


async def serve_inside(listening: socket.socket, port: int) -> None:
    """Pass on what comes to the socket, for as long as the container lives."""
    made = functools.partial(Accepted, functools.partial(to_port, port))
    server = await asyncio.get_running_loop().create_unix_server(made, sock=listening, backlog=BACKLOG)
    await server.serve_forever()


def inside(path: str, port: str, *program: str) -> NoReturn:
    """Listen, leave a process behind that passes on, and become the program."""
    here, place = Path.cwd(), Path(path)
    # By its name alone: a path may be longer than a socket's address can be.
    os.chdir(place.parent)
    listening, mask = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.umask(0)
    listening.bind(place.name)
    listening.listen(BACKLOG)
    os.umask(mask)
    os.chdir(here)
    if os.fork() == 0:
        # A child of nobody that the program would wait for.
        if os.fork() == 0:
            asyncio.run(serve_inside(listening, int(port)))
        os._exit(0)
    os.wait()
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


async def serve_outside(folder: str, name: str, told: str, parent: int | None) -> None:
    """Pass on what comes to a port, until the folder or the parent is gone."""
    loop = asyncio.get_running_loop()
    made = functools.partial(Accepted, functools.partial(to_socket, folder, name))
    server = await loop.create_server(made, LOOPBACK, 0, backlog=BACKLOG)
    port = server.sockets[0].getsockname()[1]
    _tell(told, port)
    while _is_wanted(folder, parent):  # noqa: ASYNC110 - nobody tells of either
        await asyncio.sleep(LOOK_SECONDS)


def _tell(told: str, port: int) -> None:
    new = Path(f"{told}.new")
    new.write_text(json.dumps({"pid": os.getpid(), "port": port}), encoding="ascii")
    new.replace(told)


def _is_wanted(folder: str, parent: int | None) -> bool:
    return Path(folder).is_dir() and (parent is None or os.getppid() == parent)


def outside(folder: str, name: str, told: str, parent: str | None = None) -> None:
    """Listen and pass on until it is over."""
    asyncio.run(serve_outside(folder, name, told, None if parent is None else int(parent)))


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        inside(*sys.argv[2:])
    outside(*sys.argv[2:])
