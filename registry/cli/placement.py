"""`sluicegate bundle plan`: what a bundle takes on each device, whether it fits, and the smallest layout that does."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from gates.directory import DirectoryRefused
from gates.sources.named import is_directory
from gates.sources.source import bare
from registry.cli.composed import composed
from registry.cli.documents import read_bundle, resolve
from registry.cli.failures import Exit
from registry.cli.options import Json, examples
from registry.cli.output import Output, size
from registry.cli.profile import connect
from registry.cli.sources import AllowHost, CacheFolder, From, WeightsPattern, absent, given, not_a_bundle
from registry.cli.validation import DeclaredFile, declared_in, is_weights
from registry.client import Client
from schemas.bundle import Bundle
from schemas.bundle import File as BundleFile
from schemas.problems import Usage
from schemas.short import many

if TYPE_CHECKING:
    from gates.placement.plan import Plan
    from gates.placement.topology import Topology
    from gates.static.composition import Composition

EXAMPLES = examples(
    "sluicegate bundle plan ./llama --device-memory 80GB",
    "sluicegate bundle plan ./llama -f bundle.yaml --device-memory 80GB --context 8000 --sequences 50",
    "sluicegate bundle plan hf:owner/name@main --from adapter:de=hf:org/lora --device-memory 80GB",
    "sluicegate bundle plan 3c3aff2a --device-memory 80GB --topology tp=4 --price 4 --rate 2400 --json",
)
_UNITS = {"": 1, **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}} | {
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)},
    "b": 1,
}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,6})?) ?([a-z]{0,3})")
MOST_TOKENS, MOST_SEQUENCES = 10**12, 10**9
LEAST_DEVICE, MOST_BYTES = 10**6, 10**15
"""Smallest memory of a device, and largest of anything, that is taken for one: 1 MB and 1 PB."""
LEAST_AMOUNT, MOST_AMOUNT = Decimal("1e-12"), 10**12
"""Smallest and largest price, and rate, that is taken for one: a person's exponent may be any, and arithmetic ends."""
_SMALL_BYTES = 64 * 1024 * 1024

What = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE|BUNDLE",
        help="Directory or file of weights, hf:owner/name@revision, s3://…, https://host/file, or a registered bundle.",
    ),
]
Memory = Annotated[
    str | None, typer.Option("--device-memory", metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB.")
]
Utilization = Annotated[
    str | None, typer.Option(help="Share that the engine may use; otherwise its launch argument's, or 0.90.")
]
Activations = Annotated[
    str, typer.Option(metavar="SIZE", help="Stated for activations and execution buffers, on each device.")
]
Graphs = Annotated[str, typer.Option(metavar="SIZE", help="Stated for captured graphs and workspaces, on each device.")]
Headroom = Annotated[str, typer.Option(metavar="SIZE", help="Left free on each device.")]
Context = Annotated[
    int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of each sequence; otherwise what is declared.")
]
Sequences = Annotated[
    int | None, typer.Option(min=1, max=MOST_SEQUENCES, help="Sequences at once that must fit; otherwise as declared.")
]
Judged = Annotated[
    str | None, typer.Option("--topology", metavar="LAYOUT", help="Layout to judge, such as tp=4,pp=2,ep=4.")
]
Among = Annotated[
    list[str] | None,
    typer.Option(metavar="LAYOUT", help="Layout to find the smallest among; repeatable; otherwise up to 8 devices."),
]
Price = Annotated[str | None, typer.Option(metavar="AMOUNT", help="Price of one device for an hour, in any currency.")]
Rate = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Output tokens a second that a replica was measured to sustain.")
]


def plan(
    what: What,
    part: From = None,
    file: DeclaredFile = None,
    device_memory: Memory = None,
    utilization: Utilization = None,
    activations: Activations = "4GB",
    graphs: Graphs = "0",
    headroom: Headroom = "0",
    context: Context = None,
    sequences: Sequences = None,
    topology: Judged = None,
    among: Among = None,
    price: Price = None,
    rate: Rate = None,
    weights: WeightsPattern = None,
    allow_host: AllowHost = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> int:
    """Plan a bundle's memory on each device: weights, cache and reserves, and how many sequences fit.

    Exit status: 0 when it fits, 1 when it does not, 2 for usage, 3 when something that decides is not known. Of a
    registered bundle, and of a source that is not on this machine, only configurations and the headers of weights are
    fetched; no digest can vouch for a part of a file. With -f comes what files cannot tell. Price and rate together
    give the price of a million output tokens.
    """
    # Only where it is asked for: it brings in what reads tensors, and takes a moment.
    from gates.placement import PlacementUnknown, ledger
    from gates.placement import plan as plans  # as above

    output = Output(as_json=as_json)
    if (price is None) != (rate is None):
        raise Usage("--price and --rate come together: a price a token needs both")
    asked_layouts = (
        None if topology is None else _layout(topology),
        None if not among else tuple(_layout(one) for one in among),
    )
    share = None if utilization is None else _number(utilization, "--utilization", above_zero=True, most=1)
    asked_for = _Asked(what, part, file, weights, allow_host, cache)
    with _composition(asked_for, output) as (composition, bundle):
        memory = device_memory or (None if bundle is None else str(bundle.hardware.memory_bytes or "")) or None
        if memory is None:
            raise Usage("say how much memory a device has: --device-memory 80GB")
        stated = ledger.Reserve(
            _bytes(memory, "--device-memory", least=LEAST_DEVICE),
            activation_bytes=_bytes(activations, "--activations"),
            graph_bytes=_bytes(graphs, "--graphs"),
            headroom_bytes=_bytes(headroom, "--headroom"),
        )
        try:
            asked = plans.Asked(
                plans.reserve_of(composition.declared, stated, share),
                *asked_layouts,
                context_tokens=context,
                sequences=sequences,
                price=None if price is None else _number(price, "--price"),
                rate=None if rate is None else _number(rate, "--rate", above_zero=True),
                cache_dtype=None if bundle is None else bundle.quantization.kv_cache,
            )
            found = plans.plan(composition, asked)
        except (PlacementUnknown, OSError) as error:
            reason = str(error)
            output.result({"verdict": "errored", "reason": reason}, lambda out: out.note(f"errored: {reason}", "bad"))
            return Exit.UNDECIDED
    output.result(plans.as_json(found), lambda out: _say(out, bare(what), found))
    return Exit.DONE if found.judged.judgement.fits else Exit.FAILED


# ------------------------------------------------------------------------------------------------ what is planned


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line names."""

    what: str
    parts: list[str] | None
    file: Path | None
    weights: str | None
    allow_host: list[str] | None
    cache: Path | None


@contextmanager
def _composition(asked: _Asked, output: Output) -> "Iterator[tuple[Composition, Bundle | None]]":
    """Return the composition of a source, or that of a registered bundle with its document."""
    if Path(asked.what).is_dir() or is_weights(Path(asked.what)) or not is_directory(asked.what):
        declared, parts = declared_in(asked.file)
        sources = given(asked.what, asked.parts, parts, asked.allow_host, asked.cache)
        with ExitStack() as stack:
            whole = composed(sources, declared, output, file=asked.file, weights=asked.weights, is_sketch=True)
            try:
                found = stack.enter_context(whole)
            except DirectoryRefused as refused:
                raise not_a_bundle(asked.what, refused) from None
            except OSError as error:
                raise Usage(f"{bare(asked.what)} cannot be read: {error.strerror or error}") from None
            yield found, None
        return
    if asked.what.startswith((".", "/", "~")) and not Path(asked.what).exists():
        raise absent(asked.what)
    if asked.file is not None or asked.parts or asked.weights:
        raise Usage("-f, --from and --weights go with a directory or another source: a bundle says everything itself")
    # Only where it is asked for, as above.
    from gates.static import composition

    with connect() as client, TemporaryDirectory(prefix="sluicegate-plan-") as name:
        registered = client.bundles.get(resolve(asked.what, client.bundles, read_bundle, "bundle, directory or source"))
        bundle = Bundle.model_validate(registered.document)
        for one in bundle.files:
            _fetch(client, one, Path(name))
        yield composition.of_bundle(bundle, Path(name)), bundle


def _fetch(client: Client, file: BundleFile, root: Path) -> None:
    """Write what a plan reads of a file: small ones whole, of weights the header in a file of the right length."""
    from gates.sources.fronts import WEIGHTS, is_read_whole, write_front  # as above

    place = root / file.path
    if is_read_whole(file.path):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(client.blobs.read(file.sha256, limit=_SMALL_BYTES))
    elif file.path.endswith(WEIGHTS):
        with client.blobs.stream(file.sha256) as chunks:
            write_front(chunks, file.size, file.path, place)


# ------------------------------------------------------------------------------------------------- what is written


def _layout(text: str) -> "Topology":
    from gates.placement import PlacementUnknown, topology  # as above

    try:
        return topology.parse(text)
    except PlacementUnknown as error:
        raise Usage(error.detail) from None


def _bytes(text: str, option: str, *, least: int = 0) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    unit = None if match is None else _UNITS.get(match[2])
    count = None if match is None or unit is None else Decimal(match[1]) * unit
    if count is None or count != int(count):
        raise Usage(f"{option} {text} is no size: write bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    if not least <= count <= MOST_BYTES:
        said = f"from {size(least)} to 1 PB" if least else "at most 1 PB"
        raise Usage(
            f"{option} {text} is {many(int(count), 'byte')}, and has to be {said}: write a unit too, such as 80GB"
        )
    return int(count)


def _number(text: str, option: str, *, above_zero: bool = False, most: int = MOST_AMOUNT) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise Usage(f"{option} {text} is no number") from None
    if not value.is_finite() or value < 0 or (above_zero and value == 0):
        raise Usage(f"{option} {text} is {'not above' if above_zero else 'below'} 0")
    if value > most or 0 < value < LEAST_AMOUNT:
        raise Usage(f"{option} {text} is {f'above {most}' if value > most else f'below {LEAST_AMOUNT}'}")
    return value


def _say(out: Output, what: str, found: "Plan") -> None:
    from gates.placement.plan import money  # as above

    judged = found.judged
    if judged.ledgers:
        out.table(
            ["STAGE", "USABLE", "WEIGHTS", "ADAPTERS", "DRAFT", "STATED", "LEFT FOR CACHE", "A SEQUENCE", "SEQUENCES"],
            (
                [
                    *(
                        one.stage,
                        size(one.reserve.usable_bytes),
                        size(one.weights),
                        size(one.adapters),
                        size(one.draft),
                    ),
                    size(one.reserve.activation_bytes + one.reserve.graph_bytes + one.reserve.headroom_bytes),
                    *(
                        size(one.room) if one.room >= 0 else f"-{size(-one.room)}",
                        size(one.sequence_bytes),
                        one.sequences,
                    ),
                ]
                for one in judged.ledgers
            ),
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.cache.kinds().items())
    smallest = "none of those tried"
    if found.smallest is not None:
        smallest = _laid(found.smallest.topology)
    out.fields(
        [
            ("cache", f"{found.cache.dtype}; layers: {kinds}; {_a_token(found)}"),
            ("holds", _holds(found)),
            ("smallest", smallest),
            ("a million", None if found.per_million is None else f"{money(found.per_million)} for output tokens"),
        ]
    )
    for line in found.assumed:
        out.note(line)
    tone = "good" if judged.judgement.fits else "bad"
    said = "fits" if judged.judgement.fits else "does not fit"
    out.say(f"{what} on {_laid(judged.topology)}: {said}: {judged.judgement.message}", tone)
    tight = min(judged.ledgers, key=lambda one: one.room, default=None)
    if tight is not None and tight.room <= 0 and tight.largest[0] == "activations":
        out.say("activations are what --activations says (4GB by default): state what the engine's log shows")


def _a_token(found: "Plan") -> str:
    """Say what a token takes: less once windows are full, and more with a draft."""
    cache, said = found.cache, f"{found.cache.token_bytes():,} bytes a token in all"
    if cache.windows:
        width = " and ".join(f"{one:,}" for one in cache.windows)
        said += f" until windows of {width} tokens are full, {cache.further_bytes():,} from then on"
    if found.draft is not None:
        said += f"; {found.draft.token_bytes():,} more for the draft"
    return said


def _holds(found: "Plan") -> str:
    """Say how many tokens of context there is room for; of some of them windowed layers keep nothing any more."""
    tokens, context = found.judged.judgement.cached_tokens, found.context_tokens
    said = f"{tokens:,} tokens of context, at {context:,} a sequence"
    width = max(found.cache.windows, default=context)
    if width < context:
        kept = "the last " + " or ".join(f"{one:,}" for one in found.cache.windows if one < context)
        said += f"; windowed layers keep {kept} of each"
    return said if found.draft is None else f"{said}; the draft's cache of them is counted too"


def _laid(topology: "Topology") -> str:
    return f"{topology} ({many(topology.devices, 'device')})"
