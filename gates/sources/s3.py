"""Objects under a prefix of an S3 bucket: `s3://bucket/prefix`.

A bucket that keeps versions is pinned by the version of each object. Another has no name of its bytes but an ETag,
which is no digest: there the files are read under the ETags that were listed, and pinned by what was received.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError

from gates.bucket import Address, Answer, Bucket, BucketRefused, Listed, RangeIgnored
from gates.files.listing import MAX_ENTRIES
from gates.files.names import refuse_hostile
from gates.files.refusal import shown
from gates.sources.source import Item, Opened, Resolved, SourceRefused, SourceUnavailable, bare, resolved_now
from schemas.common import canonical_json, sha256_digest
from schemas.problems import NotFound, Unavailable

ResultT = TypeVar("ResultT")

_CHUNK = 1 << 20
_ASKED_AT_ONCE = 8
_MOST_DIGESTS = 1000
"""Objects that are asked for the digest that the server keeps: one request each."""
_ADVICE = {
    "NoCredentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile with AWS_PROFILE",
    "AccessDenied": "use an account that may list and read the bucket",
    "NoSuchBucket": "check the name; a server other than AWS is named with AWS_ENDPOINT_URL_S3",
}


class S3Source:
    """All objects under a prefix.

    Args:
        asked: as it was written.
        endpoint: URL of the server; None for AWS.

    Raises:
        SourceRefused: `source-malformed`.
    """

    def __init__(self, asked: str, endpoint: str | None = None) -> None:
        self.asked = asked
        try:
            self._address = Address.parse(asked)
        except ValueError as error:
            said = f"{shown(bare(asked))} {error}"
            raise SourceRefused("source-malformed", said, file="", expected="s3://bucket/prefix") from None
        try:
            self._bucket = Bucket(self._address.bucket, endpoint=endpoint)
        except (BotoCoreError, ValueError) as error:
            said = f"the S3 client cannot be set up: {shown(str(error))}"
            raise SourceRefused("source-malformed", said, file="") from None
        self._listed: dict[str, Listed] = {}

    def resolve(self) -> Resolved:
        """Resolve the prefix: to the versions of its objects, or to nothing before they were received.

        Raises:
            SourceRefused: `not-found`, `not-permitted`, `too-many-files`, or a name that no file may have.
            SourceUnavailable.
        """
        self._listed = self._list()
        location = f"{self._address.bucket}/{self._address.prefix}".rstrip("/")
        revision = None
        if all(one.version for one in self._listed.values()):
            named = [{"path": path, "size": one.size, "version": one.version} for path, one in self._listed.items()]
            revision = sha256_digest(canonical_json(named))
        return resolved_now("s3", self.asked, location=location, revision=revision)

    def list(self, resolved: Resolved) -> list[Item]:  # noqa: ARG002 - other sources need it
        """Return the objects that the prefix resolved to, each with its digest where the server keeps one."""
        paths = list(self._listed)
        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="s3-digest") as pool:
            digests = dict(zip(paths, pool.map(self._digest, paths[:_MOST_DIGESTS]), strict=False))
        return [
            Item(path, one.size, sha256=digests.get(path), version=one.version) for path, one in self._listed.items()
        ]

    @contextmanager
    def open(
        self,
        resolved: Resolved,  # noqa: ARG002 - other sources need it
        item: Item,
        *,
        offset: int,
        tag: str | None,
    ) -> Iterator[Opened]:
        """Open the bytes that were listed, never others.

        Raises:
            SourceRefused: `source-unstable`, `not-found`, `not-permitted`.
            SourceUnavailable.
        """
        one = self._listed[item.path]
        own = one.version or one.etag
        start = offset if tag == own and 0 < offset < one.size else 0
        start, answer = self._asked(lambda: self._from(one, start))
        body = answer["Body"]
        try:
            yield Opened(start, start + int(answer["ContentLength"]), own, _chunks(body))
        finally:
            body.close()

    def _from(self, one: Listed, start: int) -> tuple[int, Answer]:
        """Ask for an object from a byte on; from its start where the server knows no ranges."""
        etag = None if one.version else one.etag
        try:
            return start, self._bucket.get(one.key, start, etag, one.version)
        except RangeIgnored:
            return 0, self._bucket.get(one.key, 0, etag, one.version)

    def _list(self) -> dict[str, Listed]:
        found: dict[str, Listed] = {}
        for one in self._asked(self._objects):
            path = one.key.removeprefix(self._address.prefix)
            if not path or path.endswith("/"):
                continue  # what consoles show as a folder
            if (hostile := refuse_hostile(path)) is not None:
                raise SourceRefused(hostile.code, hostile.message, file=shown(path), found=hostile.found)
            found[path] = one
        if not found:
            said = f"there is no object under {self.asked}"
            raise SourceRefused("not-found", said, file="", advice="check bucket and prefix, which are case-sensitive")
        return found

    def _objects(self) -> Sequence[Listed]:
        try:
            newest = self._bounded(self._bucket.newest(self._address.prefix))
            if newest and all(one.version for one in newest):
                return newest
        except BucketRefused as refused:
            if refused.code in {"NoCredentials", "NoSuchBucket"}:
                raise
        # Not every server knows versions, not every account may see them, and ETags may be others in their listing.
        return self._bounded(self._bucket.list(self._address.prefix))

    def _bounded(self, listed: Iterator[Listed]) -> Sequence[Listed]:
        found = list(islice(listed, MAX_ENTRIES + 1))
        if len(found) > MAX_ENTRIES:
            raise SourceRefused("too-many-files", f"{self.asked} holds more than {MAX_ENTRIES} objects", file="")
        return found

    def _digest(self, path: str) -> str | None:
        one = self._listed[path]
        return self._asked(lambda: self._bucket.digest(one.key, one.version))

    def _asked(self, act: Callable[[], ResultT]) -> ResultT:
        try:
            return act()
        except BucketRefused as refused:
            if refused.code == "PreconditionFailed":
                raise SourceRefused("source-unstable", "has changed since it was listed") from None
            code = "not-found" if refused.code == "NoSuchBucket" else "not-permitted"
            advice = _ADVICE.get(refused.code, "use an account that may list and read the bucket")
            raise SourceRefused(code, refused.detail, file="", advice=advice) from None
        except NotFound:
            raise SourceRefused("source-unstable", "has gone since it was listed") from None
        except Unavailable as problem:
            raise SourceUnavailable("unreachable", problem.detail, file="") from None


def _chunks(body: Any) -> Iterator[bytes]:
    try:
        while chunk := body.read(_CHUNK):
            yield chunk
    except (BotoCoreError, OSError) as error:
        raise SourceUnavailable("broken-off", f"broke off: {shown(str(error))}") from None
