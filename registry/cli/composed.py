"""What `bundle validate` and `bundle plan` look at: a directory as it is, or what other sources bring, put together."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gates.files.contents import Reader
from gates.files.refusal import FileRefused
from gates.sources.source import bare
from registry.cli.output import Output
from registry.cli.sources import Given, assembled
from schemas.problems import Usage

if TYPE_CHECKING:
    from gates.static.composition import Composition
    from gates.static.declared import Declared


@contextmanager
def composed(
    asked: Given,
    declared: "Declared",
    output: Output,
    *,
    file: Path | None,
    weights: str | None = None,
    is_sketch: bool = False,
) -> "Iterator[Composition]":
    """Yield the composition of what was asked for.

    Args:
        asked: the base and its parts.
        declared: what the files cannot tell.
        output: what is told meanwhile.
        file: of the declaration: its folders are looked for beside it as well.
        weights: which weights, where the base has several.
        is_sketch: of what is not on this machine, only configurations and the headers of weights are fetched.

    Raises:
        OSError: the base's directory cannot be read.
        DirectoryRefused: the choice of files of other sources is refused, before any is fetched.
        InvalidDocument, Usage.
        Unavailable: a source cannot be reached.
    """
    from gates.static import composition  # only where it is asked for: it brings in what reads tensors

    beside = None if file is None else file.resolve().parent
    with TemporaryDirectory(prefix="sluicegate-headers-") as folder:
        try:
            if asked.directory is not None and len(asked.sources) == 1:
                found = composition.of_directory(asked.directory, declared, beside=beside, weights=weights)
            else:
                reader = Reader(declared.engine or "external", declared.arguments.words, weights)
                sketch = Path(folder) if is_sketch else None
                with assembled(asked, reader, output, sketch=sketch, is_one_enough=True) as assembly:
                    places, resolved = dict(assembly.places), assembly.resolved
                for part, one in resolved.items():
                    if one.location is not None and one.revision is not None:
                        output.note(f"{part}: {one.asked} is {one.revision}")
                found = composition.of_places(places, declared, beside=beside, several=assembly.several)
        except FileRefused as refused:
            raise Usage(f"{bare(asked.base)} {refused.message}; {refused.advice}") from None
        except FileNotFoundError as error:
            raise Usage(f"{file}: {error.strerror}: {error.filename}") from None
        yield found
