"""Single files, or a list of files with their digests, from any https server.

`https://host/path#sha256=HEX` is one file with its digest; without it the file is pinned by what was received. An
address that ends in `SHA256SUMS` is a list, as `sha256sum` writes it, of files beside it.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, unquote

from gates.files.listing import MAX_ENTRIES
from gates.files.names import refuse_hostile
from gates.files.refusal import shown
from gates.sources.hosts import read_url
from gates.sources.ranges import OtherStatus, opened, refuse_endless, refused_status
from gates.sources.source import Item, Opened, Resolved, SourceRefused, resolved_now
from gates.sources.web import Web
from schemas.common import sha256_digest

LIST_NAME = "SHA256SUMS"
MAX_LOCATION = 256
MAX_LIST_BYTES = 8 * 1024 * 1024
_FRAGMENT = re.compile(r"sha256[=:]([0-9a-f]{64})")
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_ADVICE = {
    401: "put the file where it can be had without a password, or fetch it into a directory yourself",
    403: "put the file where it can be had without a password, or fetch it into a directory yourself",
    404: "check the address",
}


class HttpsSource:
    """One file, or a list of files.

    Args:
        asked: as it was written.
        web: that is spoken through.

    Raises:
        SourceRefused: `source-malformed`, `address-malformed`.
    """

    def __init__(self, asked: str, web: Web) -> None:
        self._web = web
        self._url, mark, fragment = asked.partition("#")
        place = read_url(self._url)
        self._location = self._url.partition("?")[0]
        # What is kept of the question has no query: it may hold a signature.
        self.asked = self._location + mark + fragment
        self._folder, _, name = self._location.rpartition("/")
        self._name = unquote(name)
        match = _FRAGMENT.fullmatch(fragment)
        if mark and match is None:
            said = f"{place.shown} has a fragment that is no digest"
            raise SourceRefused("source-malformed", said, file="", found=fragment, expected="#sha256=<64 digits>")
        if not self._name:
            said = f"{place.shown} names no file"
            expected = f"the address of a file, or of a list {LIST_NAME}"
            raise SourceRefused("source-malformed", said, file="", expected=expected)
        if len(self._location) > MAX_LOCATION:
            said = f"{place.shown} has {len(self._location)} characters, more than a bundle's record of it may have"
            raise SourceRefused("source-malformed", said, file="", expected=f"at most {MAX_LOCATION}")
        self._digest = f"sha256:{match[1]}" if match is not None else None
        self._items: list[Item] = []

    @property
    def is_list(self) -> bool:
        """Whether it names a list of files."""
        return self._name == LIST_NAME

    def resolve(self) -> Resolved:
        """Resolve the address: to its digest, to its list's digest, or to nothing before it was received.

        Raises:
            SourceRefused: `list-malformed`, `end-unknown`, `digest-mismatch`, `not-found`, `not-permitted`, or as
                `Web.get`.
            SourceUnavailable.
        """
        if not self.is_list:
            # The query, which the location leaves out, may name the file.
            address = hashlib.sha256(self._url.encode()).hexdigest()
            self._items = [Item(self._name, None, sha256=self._digest, address=address)]
            return resolved_now("https", self.asked, location=self._location, revision=self._digest)
        raw = self._read_list()
        self._items = _listed(raw)
        return resolved_now("https", self.asked, location=self._location, revision=sha256_digest(raw))

    def list(self, resolved: Resolved) -> list[Item]:  # noqa: ARG002 - other sources need it
        """Return the file, or those of the list."""
        return list(self._items)

    @contextmanager
    def open(
        self,
        resolved: Resolved,  # noqa: ARG002 - other sources need it
        item: Item,
        *,
        offset: int,
        tag: str | None,
    ) -> Iterator[Opened]:
        """Open a file. Raises SourceRefused, SourceUnavailable."""
        url = f"{self._folder}/{quote(item.path)}" if self.is_list else self._url
        is_known = item.sha256 is not None
        try:
            with opened(self._web, url, offset=offset, tag=tag, is_digest_known=is_known, size=item.size) as (found, _):
                yield found
        except OtherStatus as other:
            raise refused_status(other.answer, "it", _ADVICE) from None

    def _read_list(self) -> bytes:
        with self._web.get(self._url) as answer:
            if answer.status != 200:
                raise refused_status(answer, "the list", _ADVICE)
            if self._digest is None:
                refuse_endless(answer)
            raw = answer.read(MAX_LIST_BYTES)
        if self._digest not in {None, sha256_digest(raw)}:
            said = "the list has other bytes than its digest names"
            raise SourceRefused(
                "digest-mismatch", said, file=LIST_NAME, found=sha256_digest(raw), expected=self._digest
            )
        return raw


def _listed(raw: bytes) -> list[Item]:
    found: dict[str, Item] = {}
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise SourceRefused("list-malformed", "is not UTF-8", file=LIST_NAME, offset=error.start) from None
    if len(lines) > MAX_ENTRIES:
        raise SourceRefused("too-many-files", f"lists more than {MAX_ENTRIES} files", file=LIST_NAME)
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            said = f"has no digest and name in line {number}"
            raise SourceRefused("list-malformed", said, file=LIST_NAME, found=line, expected="<64 digits>  <path>")
        path = match[2].removeprefix("./")
        hostile = refuse_hostile(path)
        if hostile is not None:
            raise SourceRefused(hostile.code, hostile.message, file=shown(path), found=hostile.found)
        if path in found:
            said = f"names {shown(path)} twice"
            raise SourceRefused("list-malformed", said, file=LIST_NAME, found=path, expected="each file once")
        found[path] = Item(path, None, sha256=f"sha256:{match[1]}")
    if not found:
        raise SourceRefused("list-malformed", "names no file", file=LIST_NAME)
    return list(found.values())
