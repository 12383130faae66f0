"""Checks of rotary settings: they stand where a library looks, and frequencies come of them.

Source: rotary.json beside this file, and `_compute_llama3_parameters` of transformers, which blends between its two
factors: nothing where they are equal, as Llama 4 Scout has them, and backwards where they change places.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.rules import is_within, table
from gates.static.shape import Shape, rope_of
from schemas.short import many

_OLD_THETA = 10_000
_ALIKE = (("su", "longrope"), ("mrope", "default"))
"""An older name and a newer one that vLLM takes beside each other. Source: patch_legacy_rope_type of 0.32."""
_LISTS = ("short_factor", "long_factor")


def check(c: Composition) -> Iterator[Flaw]:
    """Check the rotary settings of config.json."""
    shape, file = c.model.shape, c.model.path("config.json")
    conflict = next(_conflict(shape, file), None)
    if conflict is not None:
        yield conflict
        return
    yield from _place(c, shape, file)
    yield from _numbers(shape, file)
    for pointer, told in settings(shape):
        yield from _scaling(shape, told, pointer, file)


def _numbers(shape: Shape, file: str) -> Iterator[Flaw]:
    """Find a base or a share of turned numbers that no frequencies come of."""
    places: list[tuple[str, Mapping[str, Any]]] = [("", shape.text), *((f"{at}/", one) for at, one in settings(shape))]
    for place, told in places:
        for name in ("rope_theta", "rotary_emb_base", _LOCAL):
            value = told.get(name)
            if value is not None and not (_is_number(value) and value > 0):
                yield _wrong(shape, file, place + name, f"{name} is {value!r}, and must be above 0.", value, "above 0")
        part = told.get("partial_rotary_factor")
        if part is not None and not (_is_number(part) and 0 < part <= 1):
            says = f"partial_rotary_factor is {part!r}, and must be above 0 and at most 1."
            yield _wrong(shape, file, f"{place}partial_rotary_factor", says, part, {"above": 0, "at_most": 1})


def settings(shape: Shape) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each rotary setting with its place; layers of several kinds have settings of several kinds."""
    for name in ("rope_parameters", "rope_scaling"):
        told = shape.text.get(name)
        if not isinstance(told, dict):
            continue
        inner = {kind: one for kind, one in told.items() if isinstance(one, dict)}
        if inner and len(inner) == len([one for one in told.values() if one is not None]):
            yield from ((f"{name}/{kind}", one) for kind, one in inner.items())
        else:
            yield name, told


def rotary_dim(shape: Shape, told: Mapping[str, Any]) -> int | None:
    """Return how many numbers of a head are turned; None where the files do not say."""
    if shape.is_mla:
        return shape.rope_dim
    part = told.get("partial_rotary_factor", shape.text.get("partial_rotary_factor", shape.text.get("rotary_pct")))
    if part is None and shape.model_type in table("rotary")["partial_by_default"]:
        return None
    share = 1.0 if part is None else part
    if shape.head_dim is None or not _is_number(share) or not 0 < share <= 1:
        return None
    return int(shape.head_dim * share)


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _wrong(shape: Shape, file: str, pointer: str, says: str, found: Any, expected: Any) -> Flaw:
    return flaw("rope-scaling-invalid", says, file=file, pointer=shape.at(pointer), found=found, expected=expected)


def _scaling(shape: Shape, told: Mapping[str, Any], pointer: str, file: str) -> Iterator[Flaw]:
    """Find values of a rotary scaling that no frequencies come of."""
    known = table("rotary")
    key = "rope_type" if told.get("rope_type") is not None else "type"
    kind = told.get(key)
    kind = "default" if kind is None else kind
    older = told.get("type")
    if older is not None and older != kind and (older, kind) not in _ALIKE:
        says = f"The rotary scaling is of the rope_type {kind!r} and of the type {older!r}; libraries read one of them."
        yield _wrong(shape, file, f"{pointer}/type", says, older, kind)
    if not isinstance(kind, str) or kind not in known["needs"]:
        says = f"The rotary scaling is of the type {kind!r}, which no library computes."
        yield _wrong(shape, file, f"{pointer}/{key}", says, kind, sorted(known["needs"]))
        return
    some = known["one_of"].get(kind, ())
    absent = [one for one in known["needs"][kind] if told.get(one) is None]
    if some and all(told.get(one) is None for one in some):
        absent.append(" or ".join(some))
    if absent:
        says = f"The rotary scaling of the type {kind} lacks {', '.join(absent)}."
        yield _wrong(shape, file, pointer, says, {"type": kind, "missing": absent}, known["needs"][kind] or list(some))
    factor = told.get("factor")
    if factor is not None and not (_is_number(factor) and factor >= 1):
        says = f"The rotary scaling has the factor {factor!r}, and less than 1 is no scaling."
        yield _wrong(shape, file, f"{pointer}/factor", says, factor, {"from": 1})
    if kind == "llama3":
        low, high = told.get("low_freq_factor"), told.get("high_freq_factor")
        if low is not None and high is not None and not (_is_number(low) and _is_number(high) and low <= high):
            says = f"The rotary scaling has low_freq_factor {low!r}, which is above high_freq_factor {high!r}."
            yield _wrong(shape, file, f"{pointer}/low_freq_factor", says, low, {"at_most": high})
    if kind in {"longrope", "su"}:
        yield from _lists(shape, told, pointer, file)
    yield from _sections(shape, told, pointer, file)


def _lists(shape: Shape, told: Mapping[str, Any], pointer: str, file: str) -> Iterator[Flaw]:
    """Find lists of factors that are not one number above zero for each frequency."""
    turned = rotary_dim(shape, told)
    for name in _LISTS:
        factors = told.get(name)
        if factors is None:
            continue
        if not isinstance(factors, list) or not all(_is_number(one) and one > 0 for one in factors):
            says = f"{name} of the rotary scaling is no list of numbers above zero."
            yield _wrong(shape, file, f"{pointer}/{name}", says, factors, "a list of numbers above 0")
        elif turned is not None and len(factors) != turned // 2:
            given, wanted = many(len(factors), "factor"), many(turned // 2, "frequency")
            says = f"{name} of the rotary scaling has {given} for {wanted}."
            yield _wrong(shape, file, f"{pointer}/{name}", says, len(factors), turned // 2)


def _sections(shape: Shape, told: Mapping[str, Any], pointer: str, file: str) -> Iterator[Flaw]:
    """Find sections of a multimodal rotary embedding that are not all its frequencies."""
    parts, turned = told.get("mrope_section"), rotary_dim(shape, told)
    if parts is None or turned is None:
        return
    if not isinstance(parts, list) or not all(type(one) is int and one > 0 for one in parts):
        says = "mrope_section is no list of numbers above zero."
        yield _wrong(shape, file, f"{pointer}/mrope_section", says, parts, "a list of numbers above 0")
    elif sum(parts) != turned // 2:
        says = f"mrope_section is {sum(parts)} frequencies in all, and the model has {turned // 2}."
        yield _wrong(shape, file, f"{pointer}/mrope_section", says, sum(parts), turned // 2)


_SAME = ("rope_type", "factor", "original_max_position_embeddings", "partial_rotary_factor")
_LOCAL = "rope_local_base_freq"
_MEANS = {"su": "longrope", "mrope": "default"}
"""What one library calls otherwise: sections of a multimodal embedding scale nothing by themselves."""


def _conflict(shape: Shape, file: str) -> Iterator[Flaw]:
    """Find settings that stand in the old place and in the new one, and say two things."""
    text, rope = shape.text, rope_of(shape)
    parameters = text.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    full, local = (parameters.get(kind) for kind in ("full_attention", "sliding_attention"))
    new: Mapping[str, Any] = full if isinstance(full, dict) else parameters
    old = text.get("rope_scaling")
    pairs = [("rope_theta", rope["theta_top"], rope["theta_new"])]
    if isinstance(local, dict) and _LOCAL in text:
        pairs.append((_LOCAL, text[_LOCAL], local.get("rope_theta")))
    if isinstance(old, dict) and old and not any(isinstance(one, dict) for one in old.values()):
        pairs += [(f"rope_scaling.{key}", _said(old, key), _said(new, key)) for key in _SAME]
    elif (part := text.get("partial_rotary_factor")) is not None:
        pairs.append(("partial_rotary_factor", part, new.get("partial_rotary_factor")))
    for name, top, inner in pairs:
        if top is not None and inner is not None and top != inner:
            said = name.rpartition(".")[2].replace(_LOCAL, "sliding_attention.rope_theta")
            yield flaw(
                "rope-format",
                f"config.json says {name} {_shown(top)} and rope_parameters.{said} {_shown(inner)}; libraries read one "
                "of them.",
                file=file,
                pointer=shape.at(name.replace(".", "/")),
                found={name: top, f"rope_parameters.{said}": inner},
                expected="one value",
            )


def _said(told: Mapping[str, Any], key: str) -> Any:
    value = told.get(key, told.get("type", "default") if key == "rope_type" else None)
    return _MEANS.get(value, value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _part_not_read(shape: Shape) -> float | None:
    """Return the share of a head that is turned, where only the new place says it and it is not the family's own."""
    parameters, usual = shape.text.get("rope_parameters"), table("rotary")["partial"].get(shape.model_type)
    part = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    told = any(shape.text.get(key) is not None for key in ("partial_rotary_factor", "rotary_pct"))
    is_lost = not told and usual is not None and _is_number(part) and part != usual
    return float(part) if is_lost and part is not None else None


def _place(c: Composition, shape: Shape, file: str) -> Iterator[Flaw]:
    """Find settings that stand where the image's library does not look."""
    rope, version = rope_of(shape), c.rules.library("transformers")
    if version is None or not is_within(version, "<5.0.0.dev0"):
        return
    said = f"transformers {version} in the engine's image reads"
    scaling = shape.text.get("rope_scaling")
    inner = scaling.get("rope_theta") if isinstance(scaling, dict) else None
    new, where = rope["theta_new"], "rope_parameters/rope_theta"
    if new is None and type(inner) in (int, float):
        new, where = inner, "rope_scaling/rope_theta"
    usual = table("rotary")["theta_by_default"].get(shape.model_type, _OLD_THETA)
    if new is not None and rope["theta_top"] is None and new != usual:
        yield flaw(
            "rope-format",
            f"{said} rope_theta at the top level only, and would run with {usual:g} in place of {new:g}.",
            file=file,
            pointer=shape.at(where),
            found={"theta": usual, "transformers": version},
            expected={"theta": new},
        )
    elif (part := _part_not_read(shape)) is not None:
        turned = table("rotary")["partial"][shape.model_type]
        yield flaw(
            "rope-format",
            f"{said} partial_rotary_factor at the top level only, and would turn {turned:g} of each head in place of "
            f"{part:g}.",
            file=file,
            pointer=shape.at("rope_parameters/partial_rotary_factor"),
            found={"partial_rotary_factor": turned, "transformers": version},
            expected={"partial_rotary_factor": part},
        )
    elif rope["in_parameters"] and rope["type"] != "default" and not scaling:
        yield flaw(
            "rope-format",
            f"{said} the rotary scaling in rope_scaling only, and would run without that of the type {rope['type']}.",
            file=file,
            pointer=shape.at("rope_parameters"),
            found={"type": "default", "transformers": version},
            expected={"type": rope["type"], "factor": rope["factor"]},
        )
