"""A real RabbitMQ on free loopback ports, from Debian's package, with an account of its own for the service."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from kombu.connection import Connection
from kombu.exceptions import OperationalError

from tests.support import stopping
from tests.support.broker import free_port
from tests.support.certificates import certify

# Not the one in the path: that one changes the account, and writes where the package says.
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
MISSING = "not run: RabbitMQ is not installed; Debian's package is rabbitmq-server"
QUEUES = r"^(control|runner\..+)$"
"""What the account may make: all that the service needs of a broker."""
WRITTEN = r"^(control|runner\..+|amq\.default)$"
"""What it may write to; it reads what it may make."""
QUORATE = "quorate"
"""Virtual host whose queues are quorum queues where nobody says otherwise."""


def is_installed() -> bool:
    """Tell whether there is a RabbitMQ to start."""
    return SERVER.is_file()


def _definitions(password: str) -> dict[str, Any]:
    """Return the account and its virtual hosts, as RabbitMQ imports them."""
    salt = os.urandom(4)
    hashed = base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
    user = {"name": "gate", "password_hash": hashed, "hashing_algorithm": "rabbit_password_hashing_sha256", "tags": ""}
    may = {"user": "gate", "configure": QUEUES, "write": WRITTEN, "read": QUEUES}
    return {
        "users": [user],
        "vhosts": [
            {"name": "/"},
            {"name": QUORATE, "metadata": {"description": "", "tags": [], "default_queue_type": "quorum"}},
        ],
        "permissions": [{"vhost": name, **may} for name in ("/", QUORATE)],
    }


class Rabbit:
    """One broker. `with` starts and ends it; in between it may be stopped, killed, and started again on its data."""

    def __init__(self, folder: Path) -> None:
        """Choose ports, and write its configuration and a certificate."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port, self.secured, self._names, distribution = free_port(), free_port(), free_port(), free_port()
        self.certificate, key = certify(folder, "127.0.0.1")
        self.password = uuid4().hex
        lines = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "load_definitions": str(folder / "definitions.json"),
            "log.console": "true",
            "log.file": "false",
            # The second is another name than the certificate's.
            "listeners.ssl.1": f"127.0.0.1:{self.secured}",
            "listeners.ssl.2": f"127.0.0.2:{self.secured}",
            "ssl_options.cacertfile": str(self.certificate),
            "ssl_options.certfile": str(self.certificate),
            "ssl_options.keyfile": str(key),
        }
        (folder / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
        (folder / "definitions.json").write_text(json.dumps(_definitions(self.password)))
        (folder / "plugins").write_text("[].\n")
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._names),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server
        }
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address, with account and password."""
        return f"amqp://gate:{self.password}@127.0.0.1:{self.port}//"

    @property
    def quorate_url(self) -> str:
        """Address of the virtual host whose queues are quorum queues."""
        return f"amqp://gate:{self.password}@127.0.0.1:{self.port}/{QUORATE}"

    @property
    def said(self) -> str:
        """What it wrote."""
        return (self._folder / "rabbit.log").read_text("utf-8", errors="replace")

    def __enter__(self) -> Self:
        # Of our own: the server would start one that nobody ends.
        command, log = ["epmd", "-port", str(self._names)], subprocess.DEVNULL
        self._mapper = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self.kill()
        self._mapper.kill()
        self._mapper.wait()

    def start(self) -> None:
        """Start it on what it has, and wait until it answers."""
        with (self._folder / "rabbit.log").open("ab") as log:
            self._server = subprocess.Popen(
                [str(SERVER)], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        ends = time.monotonic() + 60
        while True:
            try:
                with Connection(self.url, connect_timeout=5) as connection:  # type: ignore[no-untyped-call] # kombu's
                    connection.connect()
                return
            except (OSError, OperationalError):
                if time.monotonic() > ends or self._server.poll() is not None:
                    raise AssertionError(f"RabbitMQ does not start: {self.said[-2000:]}") from None
                time.sleep(0.1)

    def stop(self) -> None:
        """End it in order."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(timeout=60)
            self._server = None

    def freeze(self) -> None:
        """Let it stand still: its kernel takes what is sent, and nothing is answered."""
        assert self._server is not None
        stopping.stand_still(self._server.pid)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._server is not None
        stopping.go_on(self._server.pid)
