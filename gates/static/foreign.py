"""Files that are something else than their name says, such as the page that a server answered in place of one."""

from typing import Final

from gates.files import magic
from gates.files.refusal import FileRefused, opened
from gates.static.flaw import Flaw, flaw
from gates.static.listing import Entry, sentence

_EXPECTED: Final = {"json": "JSON", "jinja": "a template as text", "txt": "text", "model": "a SentencePiece model"}


def foreign(entry: Entry) -> Flaw | None:
    """Return the finding of a file that is something else by its first bytes; None where nothing speaks for it.

    One that cannot be read is nothing: whoever needs it says so.
    """
    try:
        with opened(entry.place) as (file, _):
            found = magic.nature(file.read(magic.HEAD_BYTES))
    except FileRefused:
        return None
    if found is None:
        return None
    ending = entry.name.rpartition(".")[2].lower()
    return flaw(
        "file-foreign",
        f"{entry.path} is {found.said}.",
        file=entry.path,
        found=found.said,
        expected=_EXPECTED.get(ending, "text"),
        advice=sentence(found.advice),
    )
