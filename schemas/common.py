"""Types that every document shares, and the one way a document becomes bytes and a digest.

A document is closed (unknown fields are refused), frozen, and written as RFC 8785 canonical JSON with nulls
left out. It has no implicit defaults: a field is required or absent. Decimals are strings, so that a digest
never depends on how a language prints a float.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Self

import rfc8785
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
)

from schemas.strict_json import strict_json as strict_json  # noqa: PLC0414 - a part of what this module offers

MAX_INTEGER = 2**53 - 1
"""Largest whole number that canonical JSON writes (RFC 8785, 3.2.2.3, of I-JSON)."""
MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
"""Largest document accepted anywhere, in bytes of JSON."""

NAME_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
S3_PATTERN = r"^s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_][A-Za-z0-9_.=+-]*)*)/?$"
_COMPONENT = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,119}$")
_DEVICE = re.compile(r"^(con|prn|aux|nul|com[0-9]|lpt[0-9]|conin|conout)$", re.IGNORECASE)
_DECIMAL = re.compile(r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,12})?$")

Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
"""`sha256:` and 64 lower-case hexadecimal digits."""
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""What a person calls a thing: 1–63 of a–z, 0–9, `.` and `-`, starting and ending with a letter or digit."""
LABEL_VALUE_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
LABEL_PATTERN = f"{NAME_PATTERN[:-1]}={LABEL_VALUE_PATTERN[1:]}"
"""A label as one word: name=value."""
LabelValue = Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN)]
"""Value of a label: 1–63 of letters, digits, `.`, `_` and `-`, starting and ending with a letter or digit."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Integer = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True)]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER, strict=True)]
BasisPoints = Annotated[int, Field(ge=0, le=10_000, strict=True)]
"""A traffic weight in 1/10,000."""


def _to_decimal(value: object) -> object:
    if isinstance(value, Decimal):
        return value
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        try:
            return Decimal(value)
        except InvalidOperation as error:
            raise ValueError("must be a decimal number in a string") from error
    raise ValueError('must be a decimal number in a string, such as "0.05"')


def _canonical_decimal(value: Decimal) -> str:
    text = format(value, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


DecimalString = Annotated[
    Decimal,
    BeforeValidator(_to_decimal),
    PlainSerializer(_canonical_decimal, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _DECIMAL.pattern}),
]
"""A decimal number written as a string, at most 18 digits before and 12 after the point."""


def _within(low: str, high: str) -> AfterValidator:
    def check(value: Decimal) -> Decimal:
        if not Decimal(low) <= value <= Decimal(high):
            raise ValueError(f"must be between {low} and {high}")
        return value

    return AfterValidator(check)


Ratio = Annotated[DecimalString, _within("0", "1")]
"""A share from 0 to 1, as a decimal string."""
Seconds = Annotated[DecimalString, _within("0", "31622400")]
"""A duration in seconds, 0 to 366 days, as a decimal string."""


def check_path(path: str) -> str:
    """Return a bundle's relative POSIX path, or raise ValueError when the file-name policy refuses it.

    Components hold 1–120 characters of `[A-Za-z0-9._+-]`, do not start with `.` or `-` nor end in `.`, and are
    no Windows device name; depth at most 6, whole path at most 240 bytes.
    """
    parts = path.split("/")
    if any("\ud800" <= character <= "\udfff" for character in path):
        raise ValueError("path is not UTF-8")
    if len(path.encode()) > 240:
        raise ValueError("path is longer than 240 bytes")
    if len(parts) > 6:
        raise ValueError("path is deeper than 6 folders")
    for part in parts:
        if part in {"", ".", ".."}:
            raise ValueError("path must be relative, without empty, '.' or '..' parts")
        if not _COMPONENT.fullmatch(part) or part.endswith("."):
            raise ValueError(f"path part {part[:120]!r} has characters that bundles do not allow")
        if _DEVICE.match(part.split(".")[0]):
            raise ValueError(f"path part {part!r} is a device name on Windows")
    return path


RelativePath = Annotated[str, StringConstraints(min_length=1, max_length=240), AfterValidator(check_path)]


_YEARS = (1970, 2200)


def _utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("must carry a time zone")
    said = f"must be of a year from {_YEARS[0]} to {_YEARS[1]}"
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        raise ValueError(said) from None
    # Years of fewer digits would be written so that nobody reads them again.
    if not _YEARS[0] <= moment.year <= _YEARS[1]:
        raise ValueError(said)
    return moment


def format_instant(value: datetime) -> str:
    """Return an instant as RFC 3339 in UTC with microseconds and `Z`."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


Instant = Annotated[datetime, AfterValidator(_utc), PlainSerializer(format_instant, return_type=str)]
"""An instant: aware, UTC, RFC 3339 with `Z` on the wire."""


class Closed(BaseModel):
    """A part of a document or message: frozen, and closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Wire(BaseModel):
    """What the service answers: frozen; unknown fields are ignored, so that an older client reads a newer server."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Document(Closed):
    """A document named by the digest of its canonical JSON."""

    SCHEMA_ID: ClassVar[str]

    def canonical(self) -> bytes:
        """Return the document's RFC 8785 bytes: keys sorted, no white space, nulls left out."""
        return canonical_json(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    @property
    def digest(self) -> str:
        """The document's name: `sha256:` and the SHA-256 of `canonical()`."""
        return sha256_digest(self.canonical())

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Read a document from JSON bytes.

        Raises:
            ValueError: not strict JSON (duplicate keys, NaN, too deep or too large); pydantic.ValidationError,
                a ValueError, when the JSON is not such a document.
        """
        return cls.model_validate(strict_json(raw))


_write_plain = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def _is_plain(value: Any) -> bool:
    """Tell whether Python's own writer, which is ten times as fast, writes a value as RFC 8785 asks for.

    The two differ in floats, in the order of names beyond ASCII, and in what they refuse.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is dict:
        return all(type(name) is str and name.isascii() and _is_plain(one) for name, one in value.items())
    if kind is list:
        return all(map(_is_plain, value))
    return kind is int and abs(value) <= MAX_INTEGER


def canonical_json(value: Any) -> bytes:
    """Return RFC 8785 canonical JSON. Raises ValueError for what JSON or I-JSON cannot hold."""
    try:
        if _is_plain(value):
            return _write_plain(value).encode()
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError(f"cannot be written as canonical JSON: {error}") from error


def sha256_digest(data: bytes) -> str:
    """Return `sha256:<hex>` of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sorted_unique(values: Iterable[str], what: str) -> None:
    """Raise ValueError unless the strings are sorted and distinct: a set has one spelling."""
    listed = list(values)
    if listed != sorted(listed):
        raise ValueError(f"{what} must be sorted")
    if len(set(listed)) != len(listed):
        raise ValueError(f"{what} must not repeat")


def folded(path: str) -> str:
    """Return the form in which two paths that a file system could confuse are equal (NFKC, case folded)."""
    return unicodedata.normalize("NFKC", path).casefold()
