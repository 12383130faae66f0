"""`sluicegate blob`: what of the stored bytes nothing needs, and what is damaged."""

from typing import Annotated

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect
from schemas.short import many

app = group("Blobs: stored bytes, by digest.")


@app.command(epilog=examples("sluicegate blob gc --dry-run", "sluicegate blob gc --json"))
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    as_json: Json = False,
) -> int:
    """Clear up blobs that no bundle and no kept record needs, in every project; for administrators.

    Each goes a time of grace after it was last used. Blobs that the store has lost are named, and stop nothing:
    the exit status is then 1.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.blobs.collect(is_dry_run=dry_run)

    def human(out: Output) -> None:
        went = "would go" if found.is_dry_run else "went"
        strays = many(found.strays, "file")
        out.say(f"{many(found.blobs, 'blob')} {went}, {size(found.bytes)}; {strays} that nobody recorded")
        if found.missing_count:
            are = "is" if found.missing_count == 1 else "are"
            out.say(f"{many(found.missing_count, 'blob')} {are} not in the store:", "bad")
            out.table(["MISSING"], ([digest] for digest in found.missing))

    output.result(found, human)
    return Exit.FAILED if found.missing_count else Exit.DONE


@app.command(epilog=examples("sluicegate blob check sha256:6cf2…", "sluicegate blob check sha256:6cf2… --json"))
def check(
    digest: Annotated[
        str, typer.Argument(metavar="DIGEST", help="Whole digest of a file, as `bundle show --json` has it.")
    ],
    as_json: Json = False,
) -> int:
    """Let the service read a blob of its store again. When it is damaged, bundles made of it are quarantined.

    Exit status: 0 when it is intact, 1 when it is not. Whoever has the right bytes sends them again: by the same
    `bundle create`.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.blobs.check(digest if digest.startswith("sha256:") else f"sha256:{digest}")

    def human(out: Output) -> None:
        if found.is_intact:
            out.say(f"intact: {found.digest}", "good")
            return
        out.say(f"DAMAGED: {found.digest} has the bytes of {found.found}", "bad")
        out.table(["QUARANTINED"], ([bundle] for bundle in found.quarantined))

    output.result(found, human)
    return Exit.DONE if found.is_intact else Exit.FAILED
