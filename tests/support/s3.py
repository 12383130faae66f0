"""A real S3 server on loopback, with buckets of a test's own."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support import stopping

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "sluicegate", "AWS_SECRET_ACCESS_KEY": "of-this-machine"}
# No settings of the person who runs the tests, and no question to a cloud's metadata service.
ENVIRONMENT = CREDENTIALS | {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_PORTS = (
    *("admin.port", "admin.port.grpc", "filer.port", "filer.port.grpc", "master.port", "master.port.grpc"),
    *("volume.port", "volume.port.grpc", "s3.port.grpc"),
)
_OFF = ("admin.ui=false", "webdav=false", "master.telemetry=false", "s3.autoCreateBucket=false", "s3.port.iceberg=0")
STARTS_SECONDS = 30


class S3Server:
    """SeaweedFS, with all that it listens on bound to loopback."""

    def __init__(self) -> None:
        """Start it and wait until it answers."""
        self._folder = tempfile.TemporaryDirectory(prefix="sluicegate-s3-")
        folder = Path(self._folder.name)
        (folder / "data").mkdir()
        port, *ports = _free_ports(1 + len(_PORTS))
        self._ports = (port, *ports)
        self.url, self.bucket = f"http://127.0.0.1:{port}", "tests"
        chosen = [f"-{name}={number}" for name, number in zip(_PORTS, ports, strict=True)]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                *(_binary(), "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *(f"-s3.port={port}", *chosen, *(f"-{name}" for name in _OFF)),
                # Otherwise they lie in the folder of all temporary files, and stay there.
                *(f"-{name}.localSocket={folder / name}.sock" for name in ("s3", "filer")),
            ],
            cwd=folder,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **CREDENTIALS, "HOME": str(folder)},
        )
        self.client = self._client()
        try:
            self._wait(folder / "log")
        except BaseException:
            self.stop()
            raise

    def _client(self) -> Any:
        session = botocore.session.Session()
        key, secret = CREDENTIALS.values()
        retries = {"mode": "standard", "total_max_attempts": 1}
        return session.create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(s3={"addressing_style": "path"}, retries=retries, connect_timeout=2, read_timeout=20),
        )

    def _wait(self, log: Path) -> None:
        """Return when a bucket can be made and written to: parts of the server come up after it listens."""
        ends = time.monotonic() + STARTS_SECONDS
        while True:
            try:
                self.client.create_bucket(Bucket=self.bucket)
                self.client.put_object(Bucket=self.bucket, Key="first", Body=b"x")
            except (BotoCoreError, ClientError):
                if time.monotonic() > ends or self._process.poll() is not None:
                    raise RuntimeError(log.read_text("utf-8", errors="replace")[-4000:]) from None
                time.sleep(0.05)
            else:
                return

    def place(self) -> str:
        """Return a prefix that nobody has used, without a slash at its end: a bucket of its own takes a second."""
        return f"p{uuid4().hex}"

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects under a prefix."""
        answer = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return [one["Key"] for one in answer.get("Contents", ())]

    def uploads(self, prefix: str) -> list[str]:
        """Return the keys of uploads in parts under a prefix that nobody has ended."""
        answer = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)
        return [one["Key"] for one in answer.get("Uploads", ())]

    def stand_still(self) -> None:
        """Answer nothing until `go_on`."""
        stopping.stand_still(self._process.pid)

    def go_on(self) -> None:
        """Answer again."""
        stopping.go_on(self._process.pid)

    def stop(self) -> None:
        """End it and remove what it holds."""
        self._process.kill()
        self._process.wait()
        self.client.close()
        self._log.close()
        self._folder.cleanup()
        # It names these by its ports alone, and leaves them.
        for number in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink(missing_ok=True)


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the S3 server is not installed: it comes with the extra `dev`")
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
