"""Opens a file over https from an offset on, and checks that the answer is about that file and that offset."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gates.files.refusal import shown
from gates.sources.source import Opened, SourceRefused, SourceUnavailable
from gates.sources.web import Answer, Web

_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_STRONG_TAG = re.compile(r'"[!#-~]{1,256}"')


class OtherStatus(Exception):
    """The answer has no bytes. The source knows what its status means."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__(f"status {answer.status}")


@contextmanager
def opened(
    web: Web, url: str, *, offset: int, tag: str | None, is_digest_known: bool, size: int | None = None
) -> Iterator[tuple[Opened, Answer]]:
    """Open a file's bytes.

    Args:
        web: that is spoken through.
        url: of the file.
        offset: of the first byte wanted.
        tag: what the bytes before the offset were called; they are gone on from only if it still holds.
        is_digest_known: the bytes will be held against a digest, so that they may be gone on from without a tag.
        size: of the whole file, where it is known.

    Raises:
        OtherStatus: the status is neither 200 nor 206.
        SourceRefused: also `end-unknown`, when neither answer nor caller knows where the file ends.
        SourceUnavailable.
    """
    is_end_known = is_digest_known or size is not None
    if offset and (tag is not None or is_digest_known):
        asked = {"range": f"bytes={offset}-"} | ({"if-range": tag} if tag is not None else {})
        with web.get(url, asked) as answer:
            found = _resumed(answer, offset, tag, size, is_end_known=is_end_known)
            if found is not None:
                yield found, answer
                return
    with web.get(url) as answer:
        yield _whole(answer, is_end_known=is_end_known), answer


def _resumed(answer: Answer, offset: int, tag: str | None, size: int | None, *, is_end_known: bool) -> Opened | None:
    """Return what an answer to a range brings; None when the file has to be asked for as a whole."""
    if answer.status == 200:
        return _whole(answer, is_end_known=is_end_known)
    if answer.status == 416:
        return None
    if answer.status != 206:
        raise OtherStatus(answer)
    text = answer.headers.get("content-range", "")
    match = _RANGE.fullmatch(text)
    first, last, total = map(int, match.groups()) if match is not None else (-1, -1, -1)
    if first != offset or last != total - 1 or answer.length not in {None, total - offset}:
        said = f"is answered with another part than was asked for, at {answer.place.shown}"
        raise SourceRefused("range-mismatch", said, found=text or "no range", expected=f"bytes {offset}-")
    now = _tag(answer.headers)
    if (tag is not None and now != tag) or (size is not None and total != size):
        return None  # it is another file by now, and its first bytes may be others
    return Opened(offset, total, now, answer.chunks)


def _whole(answer: Answer, *, is_end_known: bool) -> Opened:
    if answer.status != 200:
        raise OtherStatus(answer)
    if not is_end_known:
        refuse_endless(answer)
    return Opened(0, answer.length, _tag(answer.headers), answer.chunks)


def refuse_endless(answer: Answer) -> None:
    """Refuse a body whose end nothing tells. Raises SourceRefused."""
    if not answer.has_end:
        said = f"is answered without a length at {answer.place.shown}, so that a part of it would look whole"
        raise SourceRefused("end-unknown", said, expected="content-length", advice="give its digest: #sha256=…")


def _tag(headers: Mapping[str, str]) -> str | None:
    """Return the ETag, if it is a strong one: a weak one may stay while bytes change."""
    tag = headers.get("etag", "")
    return tag if _STRONG_TAG.fullmatch(tag) else None


def refused_status(answer: Answer, what: str, advice: Mapping[int, str]) -> SourceRefused | SourceUnavailable:
    """Return what a status means for a file or list of files; `advice` says what to do, by status."""
    status, where = answer.status, answer.place.shown
    told = advice.get(status)
    if status in {401, 403}:
        said = f"{what} is not given out to us at {where} (status {status})"
        return SourceRefused("not-permitted", said, found=status, advice=told)
    if status in {404, 410}:
        return SourceRefused("not-found", f"{what} is not there, at {where}", found=status, advice=told)
    said = f"{what} is answered with status {status} at {shown(where)}"
    return SourceRefused("status-unexpected", said, found=status, expected=200, advice=told)
