"""Which change asks for which gate again, as tables that are read, not code that is followed.

A result carries over to another bundle only where a cell here says so. A gate or a part without a cell, and a change
that is in no part, carry nothing. The reasons are told to whoever asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from schemas.bundle import COMPONENTS


@dataclass(frozen=True, slots=True)
class Row:
    """One gate: why a change in a part asks for it again, or why its result stays true.

    `again` and `carries` map parts (`gates.difference.PARTS`) to one sentence each; every part is in exactly one of
    the two. `bound_to` says what a result holds for besides the bundle.
    """

    again: Mapping[str, str]
    carries: Mapping[str, str]
    bound_to: str


_TEXTS: Final = ("licence", "documentation", "description", "sources")
_NOT_READ: Final = {
    "licence": "No engine reads the licence.",
    "documentation": "No engine reads documentation.",
    "description": "Name, description and labels are in nothing that the engine is given.",
    "sources": "Where bytes came from changes none of them.",
}
_DOUBTFUL: Final = {"doubtful": "An engine may read a file under this name, whatever it is declared to be."}
_STAGED: Final = "Each bundle is staged in a folder of its own, and hashed where its own boot reads it."
_OTHER_WAY_BACK: Final = "From another bundle, traffic goes back to what is accepted by then, which was not drilled."

COUPLINGS: Final[Mapping[str, Row]] = {
    "integrity": Row(
        again=dict.fromkeys((*COMPONENTS, "doubtful", *_TEXTS), _STAGED),
        carries={},
        bound_to="the staged folder of one boot",
    ),
    "static": Row(
        again={
            "weights": "Headers, shapes, coverage and values are read from the weights themselves.",
            "tokenizer": "Vocabulary and special tokens are held against embeddings and configurations.",
            "template": "The template is rendered, and its stops and parsers are held against the tokenizer.",
            "quantization": "Scales, groups and methods are held against tensors, layout and engine.",
            "adapters": "Rank, modules and shapes of each adapter are held against the base.",
            "draft": "The draft's vocabulary is held against the target's.",
            "engine": "What an engine reads and refuses goes by its version and arguments.",
            "topology": "Heads, layers, experts and groups are divided by the layout.",
            "hardware": "Number formats and devices are held against what the layout takes.",
            "runtime": "Context and sampling defaults are held against what the model has positions for.",
            "serving": "Declared features and the name are held against template, parsers and arguments.",
            "licence": "Every file's name and kind is checked, also those that no engine reads.",
            "documentation": "Every file's name and kind is checked, also those that no engine reads.",
        }
        | _DOUBTFUL,
        carries={part: _NOT_READ[part] for part in ("description", "sources")},
        bound_to="the version of the gate's tables of engines",
    ),
    "placement": Row(
        again={
            "weights": "Bytes on each device are added up from the headers of the weights.",
            "quantization": "Bits of weights and cache decide how much there is to hold.",
            "adapters": "Each adapter takes memory on every device.",
            "draft": "The draft's weights and cache stand beside the target's.",
            "engine": "How heads, windows and vocabularies are divided and kept goes by the engine.",
            "topology": "The layout decides what one device holds.",
            "hardware": "The plan is held against this memory and these devices.",
            "runtime": "Context and sequences are what has to fit.",
        }
        | _DOUBTFUL,
        carries={
            "tokenizer": "No byte on a device is counted from the tokenizer; the embedding's rows are the weights'.",
            "template": "No byte on a device is counted from the template.",
            "serving": "No byte on a device is counted from the contract with callers.",
        }
        | _NOT_READ,
        bound_to="the devices and the memory of the runner",
    ),
    "compatibility": Row(
        again={
            "weights": "Whether it boots, and how long that takes, is decided by what it loads.",
            "tokenizer": "Limits, stops and the bytes of a stream are made of its tokens.",
            "template": "Roles, tools and what a malformed conversation is answered with go through the template.",
            "quantization": "A kernel for it may be missing, and then the engine does not boot.",
            "adapters": "Adapters are loaded at boot and are names that requests may carry.",
            "draft": "The draft is loaded at boot, and streams come in other pieces.",
            "engine": "Wire format, errors and limits are the engine's own.",
            "topology": "Every rank has to come up, and one that does not is a boot that hangs.",
            "hardware": "Kernels are chosen by the machine, and some are not there.",
            "runtime": "Context and batch limits are what requests beyond them are refused by.",
            "serving": "Name and declared features are what is asked for.",
        }
        | _DOUBTFUL,
        carries=_NOT_READ,
        bound_to="the runner's hardware, driver and kernel, and the engine that booted there",
    ),
    "golden": Row(
        again={
            "weights": "The answers are theirs.",
            "tokenizer": "Prompts become other tokens.",
            "template": "Prompts are other texts.",
            "quantization": "Every logit moves.",
            "adapters": "With adapters loaded other kernels compute the base as well.",
            "draft": "Only a comparison shows that verification keeps the target's own answers.",
            "engine": "Other kernels and other defaults give other logits.",
            "topology": "Sums are taken in another order, and logits move with them.",
            "hardware": "Other machines choose other kernels.",
            "runtime": "Sampling defaults, chunks and caches decide how an answer is computed.",
            "serving": "A declared feature, such as determinism, changes what has to hold.",
        }
        | _DOUBTFUL,
        carries=_NOT_READ,
        bound_to="the golden suite, the reference in force on the target, the runner and its engine",
    ),
    "structured": Row(
        again={
            "weights": "How willingly a schema is kept to is the model's.",
            "tokenizer": "A grammar is compiled to masks over its tokens.",
            "template": "The template decides where the answer begins, and the parsers where it ends.",
            "quantization": "What the model wants beside what it may say shifts with every logit.",
            "adapters": "With adapters loaded other kernels compute the base as well.",
            "draft": "Proposed tokens are masked and accepted by another path than decoded ones.",
            "engine": "Which keywords are enforced is a matter of the engine's version and grammar backend.",
            "topology": "Masks are applied to logits that several devices hold parts of.",
            "hardware": "What a schema adds to the first token's time is time on this machine.",
            "runtime": "Sampling defaults and the batch decide what is left of a mask's cost.",
            "serving": "Declared features are what is asked for.",
        }
        | _DOUBTFUL,
        carries=_NOT_READ,
        bound_to="the structured suite, the runner and its engine",
    ),
    "load": Row(
        again={
            "weights": "Size and shape of the model are its speed.",
            "tokenizer": "The same prompts are other numbers of tokens.",
            "template": "The same prompts are other numbers of tokens.",
            "quantization": "Bytes to move, kernels and room for the cache are other ones.",
            "adapters": "Adapters take memory from the cache and time from every batch.",
            "draft": "Draft and verification pay off or do not, by the load.",
            "engine": "Scheduler and kernels are the engine's.",
            "topology": "Collectives take time, and memory is divided otherwise.",
            "hardware": "Time was measured on one kind of machine.",
            "runtime": "Context, batch and cache limits are what queues are made of.",
            "serving": "What ends a generation early decides for how long an abandoned one takes room.",
        }
        | _DOUBTFUL,
        carries=_NOT_READ,
        bound_to="the load suite, the runner and its engine",
    ),
    "rollback": Row(
        again=dict.fromkeys((*COMPONENTS, "doubtful", *_TEXTS), _OTHER_WAY_BACK),
        carries={},
        bound_to="the bundle that the target has accepted, the load suite, the runner and its router",
    ),
}
"""Gate of the catalogue → its row."""

NO_ROW: Final = "The table of couplings does not name this gate or this part, so nothing carries over."
NOT_REACHED: Final = "A part of the bundle changed that the comparison cannot place, so nothing carries over."


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A change that invalidates earlier results, and where it is seen.

    `parts` are those of the bundle that record it. `fingerprint` are fields of the runner's fingerprint that do.
    `outside` says where it is seen when two bundles cannot show it; then `gates` must run again for it.
    """

    name: str
    parts: tuple[str, ...] = ()
    fingerprint: tuple[str, ...] = ()
    outside: str | None = None
    gates: tuple[str, ...] = ()


_BOOTED: Final = ("compatibility", "golden", "structured", "load", "rollback")

UPGRADES: Final = (
    Upgrade("driver", ("hardware",), ("driver",), "the runner's fingerprint; a bundle has only a constraint", _BOOTED),
    Upgrade("CUDA", ("hardware",), ("cuda",), "the runner's fingerprint; a bundle has only a constraint", _BOOTED),
    Upgrade("engine", ("engine",)),
    Upgrade(
        "kernel",
        ("engine",),
        ("kernel", "cpu_flags"),
        "the runner's fingerprint, for what is not in the engine's image",
        _BOOTED,
    ),
    Upgrade("model", ("weights", "tokenizer", "adapters", "draft")),
    Upgrade("template", ("template",)),
    Upgrade("quantization", ("quantization",)),
    Upgrade("topology", ("topology",)),
    Upgrade("routing", (), (), "the gateway and its split", ("rollback",)),
)
"""Changes of one part that invalidate what was measured with the others, each with where it is seen here."""
