"""Says what a file really is by its bytes, whatever its name: pointers, archives, programs, pickles, web pages."""

import re
from dataclasses import dataclass
from typing import BinaryIO

from gates.files.refusal import FileRefused

HEAD_BYTES = 1024
"""How much of a file's beginning is looked at."""
_TAIL_BYTES = 65_557  # a ZIP archive's last record is 22 bytes and a comment of at most 65,535

_LFS = re.compile(rb"(?:\xef\xbb\xbf)?\s*version https?://[a-z0-9./_-]+/spec/[a-z0-9.]+\s")
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,19})\s*$", re.MULTILINE)
WEB_PAGE = "web-page"
_PAGE = "a web page or an XML answer"

_STARTS = (
    (b"PK\x03\x04", "archive", "a ZIP archive, as pickled weights are"),
    (b"PK\x05\x06", "archive", "a ZIP archive"),
    (b"PK\x07\x08", "archive", "a ZIP archive"),
    (b"\x1f\x8b", "archive", "a gzip archive"),
    (b"\xfd7zXZ\x00", "archive", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "archive", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "archive", "a 7z archive"),
    (b"Rar!\x1a\x07", "archive", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "archive", "an LZ4 archive"),
    (b"!<arch>\n", "archive", "an ar archive"),
    (b"\x7fELF", "program", "a program (ELF)"),
    (b"\xfe\xed\xfa\xce", "program", "a program (Mach-O)"),
    (b"\xfe\xed\xfa\xcf", "program", "a program (Mach-O)"),
    (b"\xce\xfa\xed\xfe", "program", "a program (Mach-O)"),
    (b"\xcf\xfa\xed\xfe", "program", "a program (Mach-O)"),
    (b"\xca\xfe\xba\xbe", "program", "a program (Mach-O or Java)"),
    (b"\x00asm", "program", "a program (WebAssembly)"),
    (b"#!", "program", "a script"),
    (b"\x89HDF\r\n\x1a\n", "other-format", "an HDF5 file"),
    (b"\x93NUMPY", "other-format", "a NumPy array"),
)
_PATTERNS = (
    (re.compile(rb"MZ[^\0]{0,62}\0"), "program", "a program (PE)"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "archive", "a bzip2 archive"),
    (re.compile(rb"# xet version [0-9]"), "pointer", "a git-xet pointer in place of the file"),
    (re.compile(rb"(?:(?:\.\./)*\.git)?/?annex/objects/"), "pointer", "a git-annex pointer in place of the file"),
    (
        re.compile(
            rb"\x80[\x02-\x05]|\(?c(?:os|nt|posix|sys|subprocess|builtins|__builtin__|copy_?reg|torch[a-z._]*)\n"
        ),
        "pickle",
        "a Python pickle, which runs code when it is loaded",
    ),
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|html|head|body|\?xml|error\b)", re.IGNORECASE), WEB_PAGE, _PAGE),
)
_ADVICE = {
    "lfs-pointer": "fetch the file itself, with `git lfs pull` or from the Hub",
    WEB_PAGE: "this is what a server answered in place of the file; fetch it again",
}


@dataclass(frozen=True, slots=True)
class Nature:
    """What a file really is: a reason code, and words that go on after "is". `said` names a pointer's own size."""

    code: str
    said: str
    declared_size: int | None = None

    @property
    def advice(self) -> str | None:
        """What to do, going on after a semicolon; None where there is nothing but to fetch the real file."""
        return _ADVICE.get(self.code)


def nature(head: bytes) -> Nature | None:
    """Say what a file that should be text or weights really is, by its first bytes; None when nothing speaks for it.

    Not for a safetensors file whose length is plausible: its first bytes are that length, and may look like anything.
    """
    if _LFS.match(head):
        size = _LFS_SIZE.search(head)
        declared = int(size[1]) if size else None
        of = "" if declared is None else f" of {declared} bytes"
        return Nature("lfs-pointer", f"a Git-LFS pointer in place of the file{of}", declared)
    for magic, code, said in _STARTS:
        if head.startswith(magic):
            return Nature(code, said)
    for pattern, code, said in _PATTERNS:
        if pattern.match(head):
            return Nature(code, said)
    if head[257:262] == b"ustar":
        return Nature("archive", "a tar archive")
    return None


def refuse_disguise(head: bytes, size: int, expected: str, *, pages: bool = False) -> None:
    """Refuse a file that is something else by its first bytes; `pages` takes web pages, as a document may be one.

    Raises:
        FileRefused: `lfs-pointer`, `pointer`, `archive`, `program`, `pickle`, `web-page` or `other-format`.
    """
    other = nature(head)
    if other is None or (pages and other.code == WEB_PAGE):
        return
    found = other.said if other.declared_size is None else f"{size} bytes that declare {other.declared_size}"
    raise FileRefused(
        other.code, f"is {other.said}", offset=0, found=found, expected=expected, advice=_ADVICE.get(other.code)
    )


def refuse_appended_archive(file: BinaryIO, size: int) -> None:
    """Refuse a file that a ZIP reader would open, since such readers look for an archive at the end.

    Raises:
        FileRefused: `archive`.
    """
    start = max(0, size - _TAIL_BYTES)
    file.seek(start)
    tail = file.read(_TAIL_BYTES)
    place = tail.rfind(b"PK\x05\x06")
    while place >= 0:
        record = tail[place : place + 22]
        comment = int.from_bytes(record[20:22], "little")
        directory = int.from_bytes(record[12:16], "little")
        entry = place - directory
        if len(record) == 22 and place + 22 + comment == len(tail) and directory > 0:
            # The directory of files lies right before this record; chance does not put its mark there.
            file.seek(start + entry)
            if start + entry >= 0 and file.read(4) == b"PK\x01\x02":
                raise FileRefused(
                    "archive",
                    "ends in a ZIP archive, which other readers would open",
                    offset=start + place,
                    found="a ZIP archive's end record",
                )
        place = tail.rfind(b"PK\x05\x06", 0, place)
