"""One bucket of an S3 server: its requests with their time limits and tries, and what went wrong in our words.

An ETag is never taken for a digest: what is sent carries its SHA-256, and the server says whether it got that.
"""

import base64
import hashlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, cast

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from schemas import VERSION
from schemas.common import S3_PATTERN
from schemas.problems import NotFound, Unavailable

CONNECT_SECONDS, READ_SECONDS = 3.0, 20.0
TRIES = 3
"""Of each request, with growing pauses between them."""
CONNECTIONS = 32
BUFFER_BYTES = 1 << 18
MOST_EMPTY_PAGES = 1000
"""Pages of a list without any entry that may follow each other."""

_log = logging.getLogger(__name__)

_ADDRESS = re.compile(S3_PATTERN)
_USER_INFO = re.compile(r"//[^/@\s]*@")
_CLIENTS_FAULT, _SERVERS_FAULT = 400, 500
_BUSY = frozenset({408, 429})
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})

Answer = Mapping[str, Any]


class BucketRefused(Unavailable):
    """The server answered, and will answer so again: no such bucket, or not to us. `code` is its word for that."""

    def __init__(self, detail: str, code: str) -> None:
        super().__init__(detail)
        self.code = code


class RangeIgnored(Unavailable):
    """The server answered with other bytes than from the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place in a bucket. `prefix` is empty, or ends in `/`."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `s3://bucket/prefix`. Raises ValueError."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError("must be s3://bucket or s3://bucket/prefix")
        return cls(found[1], f"{found[2][1:]}/" if found[2] else "")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing has it. `version` is None where none is kept."""

    key: str
    size: int
    etag: str
    modified: datetime
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the server has. `is_confirmed`: it said that its bytes have the SHA-256 that was sent along."""

    number: int
    etag: str
    sha256: str
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload in parts that was neither completed nor aborted, and when its last part came."""

    key: str
    upload: str
    touched: datetime


class Bucket:
    """Requests to one bucket; safe to use from several threads.

    Every method raises Unavailable when the server does not answer in time or answers that it cannot; and
    BucketRefused, which is one, when it does not let us.
    """

    def __init__(self, name: str, *, endpoint: str | None = None, region: str | None = None) -> None:
        """Use a bucket. Credentials come from where every AWS client looks for them; nothing is asked yet.

        Args:
            name: of the bucket.
            endpoint: URL of the server; None for AWS.
            region: the bucket's region; None for what the environment says.
        """
        self.name = name
        session = botocore.session.Session()

        def client(connect: float, read: float, tries: int) -> Any:
            return session.create_client(
                "s3",
                endpoint_url=endpoint,
                region_name=region,
                config=Config(
                    connect_timeout=connect,
                    read_timeout=read,
                    retries={"mode": "standard", "total_max_attempts": tries},
                    max_pool_connections=CONNECTIONS,
                    # None of the environment's either: what is sent and read here is nobody else's to see.
                    proxies={},
                    user_agent_extra=f"sluicegate/{VERSION}",
                    # Servers other than AWS often have no bucket names in their host names.
                    s3={"addressing_style": "path" if endpoint else "auto"},
                    # We send SHA-256 ourselves, where the bytes are known, and verify what comes by our own digest.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )

        self._client = client(CONNECT_SECONDS, READ_SECONDS, TRIES)
        self._hasty = client(1.0, 2.0, 1)

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()
        self._hasty.close()

    def check(self) -> None:
        """Return when the server lists the bucket, and within seconds."""
        self._ask(self._hasty.list_objects_v2, Bucket=self.name, MaxKeys=1)

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Iterator[Listed]:
        """Yield the objects under a prefix in the order of their keys' bytes, from the first beyond `after`."""
        token: str | None = None
        pages = _Pages(self.name)
        while True:
            asked: dict[str, Any] = {"Bucket": self.name, "Prefix": prefix, "MaxKeys": limit or 1000}
            asked |= {"ContinuationToken": token} if token else {"StartAfter": after} if after else {}
            answer = self._ask(self._client.list_objects_v2, **asked)
            for one in answer.get("Contents", ()):
                yield Listed(one["Key"], one["Size"], one["ETag"], one["LastModified"])
            if not answer.get("IsTruncated") or limit:
                return
            token = answer.get("NextContinuationToken")
            pages.turn(token, is_empty=not answer.get("Contents"))

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes, or None when it is not there."""
        # By a listing: a HEAD of a bucket that is gone looks like that of an object that is not there.
        return next((one.size for one in self.list(key, limit=1) if one.key == key), None)

    def open(self, key: str, *, version: str | None = None) -> BinaryIO:
        """Open an object for reading; a reading that is cut goes on where it was.

        Raises:
            NotFound: it is not there.
        """
        # A BufferedReader reads, closes and is iterated as every file in binary mode.
        return cast("BinaryIO", io.BufferedReader(_Reading(self, key, version), BUFFER_BYTES))

    def get(self, key: str, start: int, etag: str | None, version: str | None) -> Answer:
        """Ask for an object from a byte on. With an ETag, only for what has it still. Raises NotFound, RangeIgnored."""
        asked: dict[str, Any] = {"Bucket": self.name, "Key": key}
        asked |= {"Range": f"bytes={start}-"} if start else {}
        asked |= {"IfMatch": etag} if etag else {}
        asked |= {"VersionId": version} if version else {}
        answer = self._ask(self._client.get_object, **asked)
        if start and not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
            answer["Body"].close()
            raise RangeIgnored(f"the S3 server of bucket {self.name} does not go on with {key} at byte {start}")
        return answer

    def put(self, key: str, raw: bytes) -> bool:
        """Store an object at once. Returns whether the server said that it has the SHA-256 that was sent along."""
        checksum = _checksum(raw)
        answer = self._ask(
            self._client.put_object, Bucket=self.name, Key=key, Body=raw, ContentType=_BYTES, ChecksumSHA256=checksum
        )
        return bool(answer.get("ChecksumSHA256") == checksum)

    def begin(self, key: str) -> str:
        """Begin an upload in parts and return its id. Nothing shows under the key before it is completed."""
        answer = self._ask(
            self._client.create_multipart_upload,
            Bucket=self.name,
            Key=key,
            ContentType=_BYTES,
            ChecksumAlgorithm="SHA256",
        )
        return str(answer["UploadId"])

    def part(self, key: str, upload: str, number: int, raw: bytes) -> Part:
        """Send one part. Raises NotFound when the upload is no more."""
        checksum = _checksum(raw)
        answer = self._ask(
            self._client.upload_part,
            Bucket=self.name,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=raw,
            ChecksumSHA256=checksum,
        )
        return Part(number, answer["ETag"], checksum, bool(answer.get("ChecksumSHA256") == checksum))

    def complete(self, key: str, upload: str, parts: Sequence[Part]) -> None:
        """Let the parts be the object, at once. Raises NotFound when the upload is no more: it may be complete."""
        # The checksums also of a server that confirmed none: the upload was begun with them.
        told = [{"PartNumber": one.number, "ETag": one.etag, "ChecksumSHA256": one.sha256} for one in parts]
        self._ask(
            self._client.complete_multipart_upload,
            Bucket=self.name,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": told},
        )

    def abort(self, key: str, upload: str) -> None:
        """Give an upload in parts up, and what has come of it."""
        try:
            # Whoever gives up waits no longer than it must: what stays is cleared up later.
            self._ask(self._hasty.abort_multipart_upload, Bucket=self.name, Key=key, UploadId=upload)
        except NotFound:
            return  # somebody else was first

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Yield the uploads in parts under a prefix that nobody has ended."""
        more: dict[str, str] = {}
        pages = _Pages(self.name)
        while True:
            answer = self._ask(self._client.list_multipart_uploads, Bucket=self.name, Prefix=prefix, **more)
            for one in answer.get("Uploads", ()):
                yield Unfinished(one["Key"], one["UploadId"], self._touched(one))
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
            pages.turn(tuple(more.values()), is_empty=not answer.get("Uploads"))

    def _touched(self, upload: Answer) -> datetime:
        touched: datetime = upload["Initiated"]
        pages = _Pages(self.name)
        marker = 0
        while True:
            try:
                answer = self._ask(
                    self._client.list_parts,
                    Bucket=self.name,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                    PartNumberMarker=marker,
                )
            except NotFound:
                return touched  # it has just been ended
            touched = max([touched, *(part["LastModified"] for part in answer.get("Parts", ()))])
            if not answer.get("IsTruncated"):
                return touched
            marker = answer["NextPartNumberMarker"]
            pages.turn(marker, is_empty=not answer.get("Parts"))

    def versions(self, key: str) -> Iterator[tuple[str, bool]]:
        """Yield (version, whether it is the newest) of an object, also of what marks it as deleted."""
        more: dict[str, str] = {}
        pages = _Pages(self.name)
        while True:
            answer = self._ask(self._client.list_object_versions, Bucket=self.name, Prefix=key, **more)
            for one in (*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())):
                if one["Key"] == key:
                    yield str(one.get("VersionId") or "null"), bool(one.get("IsLatest"))
            # Keys come in order: those of others that begin alike follow ours.
            if not answer.get("IsTruncated") or answer.get("NextKeyMarker", "") > key:
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "VersionIdMarker": answer["NextVersionIdMarker"]}
            pages.turn(tuple(more.values()), is_empty=not (answer.get("Versions") or answer.get("DeleteMarkers")))

    def newest(self, prefix: str) -> Iterator[Listed]:
        """Yield the newest version of each object under a prefix, in the order of their keys' bytes."""
        more: dict[str, str] = {}
        pages = _Pages(self.name)
        while True:
            answer = self._ask(self._client.list_object_versions, Bucket=self.name, Prefix=prefix, **more)
            for one in answer.get("Versions", ()):
                if one.get("IsLatest"):
                    version = str(one.get("VersionId") or "null")
                    known = None if version == "null" else version
                    yield Listed(one["Key"], one["Size"], one["ETag"], one["LastModified"], known)
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "VersionIdMarker": answer["NextVersionIdMarker"]}
            pages.turn(tuple(more.values()), is_empty=not (answer.get("Versions") or answer.get("DeleteMarkers")))

    def digest(self, key: str, version: str | None) -> str | None:
        """Return the SHA-256 (`sha256:…`) that the server keeps of a whole object, or None. Raises NotFound."""
        more = {"VersionId": version} if version else {}
        answer = self._ask(self._client.head_object, Bucket=self.name, Key=key, ChecksumMode="ENABLED", **more)
        told = str(answer.get("ChecksumSHA256") or "")
        if answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
            return None  # of its parts' digests
        try:
            raw = base64.b64decode(told, validate=True)
        except ValueError:
            return None
        return f"sha256:{raw.hex()}" if len(raw) == hashlib.sha256().digest_size else None

    def remove(self, key: str) -> None:
        """Remove an object with every older version, so that its bytes are gone. Nothing happens when there is none."""
        # "null" is a version too: what lay there before versions were kept. Without its name it would only be marked
        # as deleted, and a bucket that never kept versions takes the name as well.
        for version in [version for version, _ in self.versions(key)]:
            self._ask(self._client.delete_object, Bucket=self.name, Key=key, VersionId=version)

    def _ask(self, call: Callable[..., Answer], **asked: Any) -> Answer:
        try:
            return call(**asked)
        except ClientError as error:
            raise _refusal(error, asked) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise BucketRefused(f"bucket {self.name} cannot be asked: {error}", "NoCredentials") from error
        except BotoCoreError as error:
            # Where the server is, is for whoever runs the service, in the log, and not for its callers.
            _log.info("bucket %s: %s", self.name, _USER_INFO.sub("//", str(error)))
            raise Unavailable(f"the S3 server of bucket {self.name} does not answer") from error


_BYTES = "application/octet-stream"


class _Pages:
    """The pages of one list, which has to come to an end."""

    def __init__(self, bucket: str) -> None:
        self._bucket, self._seen, self._empty = bucket, set[object](), 0

    def turn(self, token: object, *, is_empty: bool) -> None:
        """Go on to the page with this token. Raises Unavailable: it was seen, there is none, or too many are empty."""
        self._empty = self._empty + 1 if is_empty else 0
        if not token or token in self._seen or self._empty > MOST_EMPTY_PAGES:
            raise Unavailable(f"the S3 server of bucket {self._bucket} lists without an end")
        self._seen.add(token)


def _checksum(raw: bytes) -> str:
    return base64.b64encode(hashlib.sha256(raw).digest()).decode()


def _refusal(error: ClientError, asked: Mapping[str, Any]) -> NotFound | Unavailable:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in _ABSENT or code == "NoSuchUpload":
        return NotFound(f"the bucket {asked['Bucket']} has no {asked.get('Key', 'such thing')}")
    said = f"the S3 server refuses {error.operation_name} in bucket {asked['Bucket']}: {code or error}"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in _BUSY or not _CLIENTS_FAULT <= status < _SERVERS_FAULT:
        return Unavailable(said)
    return BucketRefused(said, code)


class _Reading(io.RawIOBase):
    """The bytes of one object. What is cut is asked for again from there, unless it has changed meanwhile."""

    def __init__(self, bucket: Bucket, key: str, version: str | None) -> None:
        self._bucket, self._key, self._version = bucket, key, version
        answer = bucket.get(key, 0, None, version)
        self._etag: str = answer["ETag"]
        self._body, self._size = answer["Body"], int(answer["ContentLength"])
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as bytes come. Raises Unavailable when they do not."""
        tries, raw = TRIES, b""
        while self._at < self._size:
            try:
                raw = self._body.read(min(len(buffer), self._size - self._at))
                if raw:
                    break
                problem = "it ended too early"
            except (BotoCoreError, OSError) as error:
                problem = str(error)
            tries -= 1
            if not tries:
                raise Unavailable(f"reading {self._key} from bucket {self._bucket.name} broke off: {problem}")
            self._body.close()
            self._body = self._bucket.get(self._key, self._at, self._etag, self._version)["Body"]
        else:
            return 0
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)

    def close(self) -> None:
        """Give the connection back."""
        if not self.closed:
            self._body.close()
        super().close()
