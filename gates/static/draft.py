"""Checks of a draft model: it speaks the target's tokens."""

from collections.abc import Iterator

from gates.files.contents import is_pickled
from gates.static import heads
from gates.static.composition import Composition, Part
from gates.static.flaw import Flaw, flaw
from gates.static.vocabulary import embedding_rows
from gates.static.words import Tokenizer, first_difference
from schemas.result import Severity
from schemas.short import many


def check(c: Composition) -> Iterator[Flaw]:
    """Check the draft against the target."""
    part = c.draft
    yield from heads.own(c)
    if part is None:
        return
    if not part.config and part.gguf is None:
        yield _absent(part, "config.json")
        return
    has_none = not part.weights.shards and part.gguf is None and not any(map(is_pickled, part.entries))
    if has_none and (c.model.weights.shards or c.model.gguf is not None):
        yield _absent(part, "model.safetensors")
        return
    if c.is_head(part):
        yield from heads.check(c, part)  # they read the target's own states and tokens
        return
    target, draft = _target(c, part), part.tokenizer
    differing = False
    if target is not None and draft is not None:
        place = first_difference(target.texts, draft.texts)
        if place is not None:
            differing = True
            yield flaw(
                "draft-vocab",
                f"Token {place} is {target.texts[place]!r} in the target and {draft.texts[place]!r} in the draft.",
                file=part.tokenizer_file,
                found={"first_difference": place, "draft": draft.texts[place]},
                expected={"target": target.texts[place]},
            )
        elif only := sorted(set(draft.texts) ^ set(target.texts)):
            differing = True
            yield flaw(
                "draft-vocab",
                f"{many(len(only), 'token', 'is', 'are')} in one vocabulary only, from id {only[0]} "
                f"on: the target has {len(target.texts)}, the draft {len(draft.texts)}.",
                file=part.tokenizer_file,
                found={"draft": len(draft.texts), "more": only[:20], "count": len(only)},
                expected={"target": len(target.texts)},
            )
    rows, other = embedding_rows(c.model), embedding_rows(part)
    if differing or rows is None or other is None or rows == other:
        return
    if target is None or draft is None:
        yield flaw(
            "draft-vocab",
            f"The target has {rows} rows of tokens and the draft {other}, and no tokenizers show that this is padding.",
            file=part.path("config.json"),
            found={"draft": other},
            expected={"target": rows},
        )
    elif c.rules.get("draft_vocabulary_padding") is not True:
        yield flaw(
            "draft-vocab",
            f"The tokens are the same, but the target has {rows} rows and the draft {other}; "
            f"{c.engine or 'the engine'} is not known to pad.",
            severity=Severity.WARN,
            file=part.path("config.json"),
            found={"draft": other},
            expected={"target": rows},
            advice=f"Pad the smaller embedding to {max(rows, other)} rows, or choose an engine that does.",
        )


def _target(c: Composition, part: Part) -> Tokenizer | None:
    """Return the target's tokenizer of the kind that the draft has, where it has two."""
    same = c.model.tekken if part.tokenizer is not None and part.tokenizer is part.tekken else None
    return same or c.model.tokenizer


def _absent(part: Part, name: str) -> Flaw:
    what = "weights" if name.endswith(".safetensors") else name
    return flaw("draft-incomplete", f"The draft has no {what}.", file=part.path(name), found=None, expected=name)
