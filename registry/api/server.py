"""The server: what every process and test serves the application with."""

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI


class Server(uvicorn.Server):
    """Uvicorn, which waits for open answers when it is told to end; those that follow the log are told to end too."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        """Serve an application of `create_app`. `options` are Uvicorn's."""
        super().__init__(uvicorn.Config(app, access_log=False, log_config=None, server_header=False, **options))
        self._bell = app.state.bell

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then wait for the other answers."""
        self._bell.close()
        await super().shutdown(sockets)
