"""A repository of the Hugging Face Hub as a source: one commit of it, file by file.

The library of the hub speaks its API, over our own connections; the bytes are fetched and verified here. A file is
pinned by the SHA-256 of its LFS entry or, where the commit holds it itself, by git's name of it.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.hf_api import RepoFile, RepoFolder

from gates.files.listing import MAX_ENTRIES
from gates.files.names import refuse_hostile
from gates.files.refusal import FileRefused, shown
from gates.sources.hosts import read_url
from gates.sources.ranges import OtherStatus, opened, refused_status
from gates.sources.source import Item, Opened, Resolved, SourceRefused, SourceUnavailable, resolved_now
from gates.sources.web import Web

ENDPOINT = "https://huggingface.co"
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of one
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Largest answer of the API, in bytes. A page of a thousand files has about 0.4 MB."""
MAX_PAGES = 1000
"""Most answers of the API to one question. The hub's own lists have fifty, with as many files as are taken."""
MAX_LIST_BYTES = 64 * 1024 * 1024
"""Most bytes of all answers to one question."""
Items = list[Item]
ResultT = TypeVar("ResultT")

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9._-]{1,96})?")
_REVISION = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GATED = f"accept its terms on its page, and set {TOKEN_VARIABLE} to a token of that account"
# The library has one client for the whole process.
_CLIENT = threading.Lock()


class HubSource:
    """A repository at a revision.

    Args:
        asked: as it was written, `hf:owner/name@revision`.
        web: that is spoken through; it holds the token, if there is one.
        endpoint: address of the hub, or of a mirror.

    Raises:
        SourceRefused: `source-malformed`, `address-malformed`.
    """

    def __init__(self, asked: str, web: Web, endpoint: str = ENDPOINT) -> None:
        # Spelled as the library will spell it.
        self.asked, self._web, self._endpoint = asked, web, read_url(endpoint).bare.rstrip("/")
        self.repository, at, revision = asked.removeprefix("hf:").partition("@")
        self.revision = revision if at else "main"
        if not _REPOSITORY.fullmatch(self.repository) or ".." in self.repository:
            said = f"{shown(asked)} names no repository"
            raise SourceRefused("source-malformed", said, file="", expected="hf:owner/name@revision")
        if not _REVISION.fullmatch(self.revision) or ".." in self.revision:
            said = f"{shown(asked)} names no revision"
            raise SourceRefused("source-malformed", said, file="", expected="a branch, tag or commit")

    def resolve(self) -> Resolved:
        """Ask the hub once which commit the revision is.

        Raises:
            SourceRefused: `repository-unknown`, `repository-gated`, `revision-unknown`, `repository-moved`,
                `commit-mismatch`, `answer-malformed`, or as `Web.get`.
            SourceUnavailable.
        """
        info = self._ask(lambda api: api.model_info(self.repository, revision=self.revision, token=False))
        commit, name = info.sha, info.id
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._malformed(f"a commit that is none: {shown(commit)}")
        if name != self.repository:
            said = f"{self.repository} is called {shown(name)} by now"
            advice = "name it so, if that is whom you mean: the old name may have been taken by somebody else"
            raise SourceRefused("repository-moved", said, file="", found=name, expected=self.repository, advice=advice)
        if _COMMIT.fullmatch(self.revision) and commit != self.revision:
            said = f"{self.repository} is answered with another commit than was asked for"
            raise SourceRefused("commit-mismatch", said, file="", found=commit, expected=self.revision)
        return resolved_now("huggingface", self.asked, location=self.repository, revision=commit)

    def list(self, resolved: Resolved) -> Items:
        """List the tree of the commit.

        Raises:
            SourceRefused: `name-path`, `name-control`, `too-many-files`, `answer-too-large`, `answer-malformed`, or
                as `resolve`.
            SourceUnavailable.
        """
        return self._ask(lambda api: self._tree(api, str(resolved.revision)))

    def _tree(self, api: huggingface_hub.HfApi, commit: str) -> Items:
        found: dict[str, Item] = {}
        entries = api.list_repo_tree(self.repository, recursive=True, revision=commit, token=False)
        for count, entry in enumerate(entries, start=1):
            if count > MAX_ENTRIES:
                raise SourceRefused("too-many-files", f"{self.repository} lists more than {MAX_ENTRIES} files", file="")
            if isinstance(entry, RepoFolder):
                continue
            item = self._item(entry)
            if found.setdefault(item.path, item) != item:
                raise self._malformed(f"two files {shown(item.path)}")
        return [*found.values()]

    def _item(self, entry: RepoFile) -> Item:
        # The library does not look whether a server kept to the types.
        path: Any = entry.path
        size: Any = entry.size
        blob: Any = entry.blob_id
        lfs: Any = entry.lfs
        if not isinstance(path, str) or type(size) is not int or size < 0:
            raise self._malformed(f"a file without a name or a size: {shown(path)}")
        hostile = refuse_hostile(path)
        if hostile is not None:
            raise SourceRefused(
                hostile.code, hostile.message, file=shown(path), found=hostile.found, advice="do not use this copy"
            )
        if lfs is None:
            if not isinstance(blob, str) or not _COMMIT.fullmatch(blob):
                raise self._malformed(f"a file without a digest: {shown(path)}")
            return Item(path, size, git_blob=blob)
        if not isinstance(lfs.sha256, str) or not _SHA256.fullmatch(lfs.sha256) or lfs.size != size:
            raise self._malformed(f"a file with two sizes or no digest: {shown(path)}")
        return Item(path, size, sha256=f"sha256:{lfs.sha256}")

    @contextmanager
    def open(self, resolved: Resolved, item: Item, *, offset: int, tag: str | None) -> Iterator[Opened]:
        """Open a file of the commit, wherever the hub has it brought from.

        Raises:
            SourceRefused: `commit-mismatch`, `size-mismatch`, `not-permitted`, `not-found`, or as `Web.get`.
            SourceUnavailable.
        """
        url = f"{self._endpoint}/{self.repository}/resolve/{resolved.revision}/{quote(item.path)}"
        try:
            with opened(self._web, url, offset=offset, tag=tag, is_digest_known=True, size=item.size) as (
                found,
                answer,
            ):
                # The hub itself says which commit it answers for; what it leads to is only bytes.
                first = answer.hops[0].headers if answer.hops else answer.headers
                commit = first.get("x-repo-commit", resolved.revision)
                if commit != resolved.revision:
                    said = "is answered from another commit than was asked for"
                    raise SourceRefused(
                        "commit-mismatch", said, file=item.path, found=commit, expected=resolved.revision
                    )
                linked = first.get("x-linked-size", str(item.size))
                if linked != str(item.size):
                    said = f"is announced with {shown(linked)} bytes, and its commit lists {item.size}"
                    raise SourceRefused("size-mismatch", said, file=item.path, found=linked, expected=item.size)
                yield found
        except OtherStatus as other:
            raise refused_status(other.answer, "it", {401: _GATED, 403: _GATED}) from None

    def _ask(self, act: Callable[[huggingface_hub.HfApi], ResultT]) -> ResultT:
        """Let the hub's library ask, over our connections, and say what its errors mean."""
        try:
            with _through(self._web, self._endpoint):
                return act(huggingface_hub.HfApi(endpoint=self._endpoint, token=False))
        except FileRefused:
            raise
        except errors.GatedRepoError:
            said = f"{self.repository} is gated"
            raise SourceRefused("repository-gated", said, file="", advice=_GATED) from None
        except errors.RevisionNotFoundError:
            said = f"{self.repository} has no revision {shown(self.revision)}"
            advice = "name a branch, a tag or a commit that its page shows"
            raise SourceRefused("revision-unknown", said, file="", found=self.revision, advice=advice) from None
        except errors.RepositoryNotFoundError:
            said = f"there is no repository {self.repository}, or it is private"
            advice = f"check the name; if it is private, set {TOKEN_VARIABLE} to a token that may read it"
            raise SourceRefused("repository-unknown", said, file="", found=self.repository, advice=advice) from None
        except errors.HfHubHTTPError as error:
            said = f"{self.repository} is answered with status {error.response.status_code}"
            raise SourceRefused("status-unexpected", said, file="", found=error.response.status_code) from None
        except httpx2.HTTPError as error:
            raise SourceUnavailable("unreachable", f"the hub cannot be asked: {shown(str(error))}", file="") from None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # The library takes an answer to be what its own server would send.
            raise self._malformed(shown(f"{type(error).__name__}: {error}")) from None

    def _malformed(self, what: str) -> SourceRefused:
        advice = "the hub or something on the way is broken or hostile"
        return SourceRefused("answer-malformed", f"{self.repository} is answered with {what}", file="", advice=advice)


class _Transport(httpx2.BaseTransport):
    """Lets the hub's library speak through the fetcher, to the hub alone, and ask one question."""

    def __init__(self, web: Web, endpoint: str) -> None:
        self._web, self._endpoint = web, endpoint
        self._pages, self._bytes = 0, 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Ask for an address of the hub's API. Raises SourceRefused, SourceUnavailable."""
        url = str(request.url)
        if not url.startswith(f"{self._endpoint}/api/") or request.method != "GET":
            # The next page of a list could be anywhere.
            said = f"leads to {shown(url.partition('?')[0])} from the hub's API"
            raise SourceRefused("host-not-allowed", said, file="", expected=f"{self._endpoint}/api/…")
        self._pages += 1
        if self._pages > MAX_PAGES:
            # Pages without an entry are counted nowhere else.
            raise SourceRefused("answer-too-large", f"the hub answers with more than {MAX_PAGES} pages", file="")
        with self._web.get(url) as answer:
            if answer.place.origin != self._web.hosts.check(self._endpoint).origin:
                said = f"leads to {answer.place.shown} from the hub's API"
                raise SourceRefused("host-not-allowed", said, file="", expected=self._endpoint)
            raw = answer.read(min(MAX_ANSWER_BYTES, MAX_LIST_BYTES - self._bytes))
            self._bytes += len(raw)
            return httpx2.Response(answer.status, headers=dict(answer.headers), content=raw, request=request)


@contextmanager
def _through(web: Web, endpoint: str) -> Iterator[None]:
    """Let the library's requests go through the fetcher meanwhile."""
    transport = _Transport(web, endpoint)
    with _CLIENT:
        huggingface_hub.set_client_factory(
            lambda: httpx2.Client(transport=transport, trust_env=False, follow_redirects=False)
        )
        try:
            yield
        finally:
            huggingface_hub.set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=None))
