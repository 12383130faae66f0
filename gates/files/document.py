"""Refuses what a bundle document itself shows that no bundle may hold: by sources, kinds of files and launch arguments.

Whoever registers without this repository's command line is held to what it holds directories to. Names are the schema's
(`schemas.common.check_path`), and what only the bytes show, the gate `static` finds.
"""

import re
from collections.abc import Iterator

from gates.files import remote_code
from gates.files.contents import Reader, select
from gates.files.launch import refuse_launch
from gates.files.refusal import FileRefused, pointer
from schemas.bundle import Bundle

ARGUMENTS = "/engine/arguments"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def refuse_document(bundle: Bundle) -> Iterator[tuple[str, FileRefused]]:
    """Yield each refusal with the JSON Pointer of its place in the document."""
    places = {file.path: pointer("files", number) for number, file in enumerate(bundle.files)}
    engine = bundle.engine
    code = frozenset(engine.remote_code.files if engine.remote_code is not None else ())
    for number, source in enumerate(bundle.sources):
        if source.kind == "huggingface" and not _COMMIT.fullmatch(source.revision):
            said = f"comes from {source.revision}, which may be another commit tomorrow"
            place = pointer("sources", number, "revision")
            expected = "a commit of 40 hexadecimal digits"
            yield (
                place,
                FileRefused("revision-floating", said, file=source.location, found=source.revision, expected=expected),
            )
    reader = Reader(engine.name, tuple(engine.arguments), code=code)
    told = set()
    for refused in select(places, reader, {file.path: file.role for file in bundle.files}).refused:
        told.add(refused.file)
        yield f"{places[refused.file]}/path" if refused.file else ARGUMENTS, refused
    for file in bundle.weights():
        if file.path not in told and not file.path.endswith(f".{bundle.model.format}"):
            said = f"is named otherwise than the weights' format, {bundle.model.format}"
            expected = f".{bundle.model.format}"
            yield f"{places[file.path]}/path", FileRefused("formats-mixed", said, file=file.path, expected=expected)
    is_trusted = remote_code.trusts(engine.arguments, engine.variables)
    # What configurations say about code is in the files.
    for refused in remote_code.refuse_code({}, model_types={}, is_trusted=is_trusted, accepted=code):
        yield ARGUMENTS, refused
    for refused in refuse_launch(engine.name, engine.arguments, engine.variables or {}, places):
        yield refused.pointer or ARGUMENTS, refused
