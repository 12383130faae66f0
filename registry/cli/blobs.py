"""`sluicegate blob`: what of the stored bytes nothing needs."""

from typing import Annotated

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect

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
        out.say(f"{found.blobs} blobs {went}, {size(found.bytes)}; {found.strays} files that nobody recorded")
        if found.missing_count:
            out.say(f"{found.missing_count} blobs are not in the store:", "bad")
            out.table(["MISSING"], ([digest] for digest in found.missing))

    output.result(found, human)
    return Exit.FAILED if found.missing_count else Exit.DONE
