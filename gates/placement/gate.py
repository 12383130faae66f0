"""The placement gate of a policy: a bundle's plan on the memory that the runner really has, before anything is started.

Its records are the hardware and what each stage's fullest device holds. The verdict is added up from them again, so a
plan whose sums were wrong could not pass by saying that it fits.
"""

from dataclasses import dataclass
from typing import Any

from gates.errors import InstrumentError
from gates.gate import Gate, GateContext, Judged, JudgeInput, Records, finding
from gates.placement import PlacementUnknown
from gates.placement.ledger import Judgement, Ledger, Reserve, judge
from gates.placement.plan import Asked, plan, reserve_of
from gates.placement.topology import Topology
from gates.static.composition import of_bundle
from gates.static.declared import declared_by
from schemas.bundle import Bundle, Hardware
from schemas.policy import PlacementRule
from schemas.result import Measurement, Verdict
from schemas.runner import Fingerprint
from schemas.short import many

_CODES = {"layout": "layout-impossible", "memory": "memory-short", "sequences": "sequences-short"}
_ADVICE = {
    "layout": "Declare a layout that divides the model.",
    "memory": "Declare a layout over more devices, or serve smaller weights.",
    "sequences": "Promise fewer sequences or less context, or declare a layout over more devices.",
}


@dataclass(frozen=True, slots=True)
class Devices:
    """What a runner has of what a bundle asks for: how many devices, and the memory of the smallest, in bytes.

    On `cpu` there is no number: a layout's stages share the machine's memory evenly.
    """

    count: int | None
    memory_bytes: int

    def share_of(self, topology: Topology) -> int:
        """Return the bytes that one device of a layout has."""
        return self.memory_bytes if self.count is not None else self.memory_bytes // topology.devices


def devices_of(fingerprint: Fingerprint, hardware: Hardware) -> Devices:
    """Return a runner's devices as far as a bundle could be placed on them: those with its MIG profile, or whole ones.

    Where several differ in memory the smallest counts, since nobody knows here which of them a replica will get.
    """
    if hardware.accelerator == "cpu":
        return Devices(None, fingerprint.memory_bytes)
    found = [one.memory_bytes for one in fingerprint.accelerators if one.mig == hardware.mig]
    return Devices(len(found), min(found, default=0))


def measure(context: GateContext) -> Records:
    """Plan the bundle's files on the runner's hardware.

    Raises:
        InstrumentError: a file cannot be read, or nobody said what the hardware is.
    """
    rule, bundle, fingerprint = _rule(context.rule), context.bundle, context.fingerprint
    if fingerprint is None:
        raise InstrumentError("Nobody said on which hardware this runs.")
    records: Records = {"fingerprint": fingerprint.model_dump(mode="json", exclude_none=True)}
    try:
        composition = of_bundle(bundle, context.root)
        # Only the smallest layout depends on the memory here; without any device every layout would be too large, and
        # on a processor no layout has more memory than another.
        reserve = _reserve(bundle, rule, max(1, devices_of(fingerprint, bundle.hardware).memory_bytes))
        asked = Asked(
            reserve,
            context_tokens=bundle.runtime.context_tokens,
            sequences=bundle.runtime.max_sequences,
            cache_dtype=bundle.quantization.kv_cache,
            among=() if bundle.hardware.accelerator == "cpu" else None,
        )
        found = plan(composition, asked)
    except PlacementUnknown as unknown:
        return records | {"unknown": {"pointer": unknown.pointer, "detail": unknown.detail}}
    except OSError as error:
        raise InstrumentError(f"The files could not be read: {error.strerror or error}.") from None
    topology, judged = found.judged.topology, found.judged
    return records | {
        "topology": {"tensor": topology.tensor, "pipeline": topology.pipeline, "expert": topology.expert},
        "obstacle": judged.judgement.message if judged.judgement.what == "layout" else None,
        "stages": [
            {
                "weights": one.weights,
                "adapters": one.adapters,
                "draft": one.draft,
                "sequence_bytes": one.sequence_bytes,
                "shares": dict(one.shares),
            }
            for one in judged.ledgers
        ],
        "smallest": None if found.smallest is None else str(found.smallest.topology),
        "cache": {"dtype": found.cache.dtype, "layers": found.cache.kinds(), "block_tokens": found.block_tokens},
        "assumed": list(found.assumed),
    }


def judge_plan(given: JudgeInput) -> Judged:
    """Add the records up on the recorded hardware: what does not fit fails, and what is not known decides nothing."""
    rule, bundle, records = _rule(given.rule), given.bundle, given.records
    fingerprint = Fingerprint.model_validate(records["fingerprint"])
    devices = devices_of(fingerprint, bundle.hardware)
    if (unknown := records.get("unknown")) is not None:
        message = f"What the bundle takes is not known: {unknown['pointer']}: {unknown['detail']}."
        one = finding("placement-unknown", message, pointer=str(unknown["pointer"]), advice="State it in the bundle.")
        return Judged(Verdict.INCONCLUSIVE, message, (), (one,))
    topology = _topology(records["topology"])
    short = _short(devices, bundle, topology)
    if short is not None:
        return short
    if records["obstacle"] is not None:
        return _judged(Judgement(fits=False, what="layout", message=str(records["obstacle"])), topology, given, ())
    reserve = _reserve(bundle, rule, devices.share_of(topology))
    ledgers = [_ledger(number, stage, reserve) for number, stage in enumerate(records["stages"])]
    if len(ledgers) != topology.pipeline:
        raise ValueError(f"{len(ledgers)} stages are recorded of {topology.pipeline}")
    runtime = bundle.runtime
    found = judge(ledgers, runtime.context_tokens, runtime.max_sequences, groups=topology.groups)
    return _judged(found, topology, given, _measurements(ledgers, found, runtime.max_sequences))


def _rule(rule: object) -> PlacementRule:
    if not isinstance(rule, PlacementRule):
        raise TypeError(f"{rule!r} is no rule of placement")
    return rule


def _reserve(bundle: Bundle, rule: PlacementRule, device_bytes: int) -> Reserve:
    stated = Reserve(
        device_bytes,
        activation_bytes=rule.activation_bytes,
        graph_bytes=rule.graph_bytes,
        headroom_bytes=rule.headroom_bytes,
    )
    return reserve_of(declared_by(bundle), stated, rule.utilization)


def _topology(told: Any) -> Topology:
    degrees = [told[name] for name in ("tensor", "pipeline", "expert")]
    if any(type(one) is not int or one < 1 for one in degrees):
        raise ValueError(f"{told} is no layout")
    return Topology(*degrees)


def _ledger(number: int, stage: Any, reserve: Reserve) -> Ledger:
    values = {name: stage[name] for name in ("weights", "adapters", "draft", "sequence_bytes")}
    if any(type(one) is not int or one < 0 for one in values.values()):
        raise ValueError(f"stage {number} holds what is no number of bytes")
    return Ledger(stage=number, reserve=reserve, **values)


def _short(devices: Devices, bundle: Bundle, topology: Topology) -> Judged | None:
    """Return the failure of a runner that has not what the bundle asks for, or None."""
    hardware, advice = bundle.hardware, "Release it to runners that have what it asks for."
    # Groups that spread experts are counted in the layout already.
    copies = 1 if topology.groups > 1 else bundle.topology.data_parallel
    needed = max(hardware.count, topology.devices * copies)
    if devices.count is not None and devices.count < needed:
        kind = "" if hardware.mig is None else f" with the MIG profile {hardware.mig}"
        message = f"The runner has {many(devices.count, 'accelerator')}{kind}, and a replica takes {needed}."
        pointer = "/hardware/count"
        one = finding("devices-short", message, pointer=pointer, found=devices.count, expected=needed, advice=advice)
        return Judged(Verdict.FAILED, message, (), (one,))
    least = hardware.memory_bytes
    if least is not None and devices.memory_bytes < least:
        has = many(devices.memory_bytes, "byte")
        message = f"A device of the runner has {has}, and the bundle asks for {least}."
        one = finding(
            "device-memory-short",
            message,
            pointer="/hardware/memory_bytes",
            found=devices.memory_bytes,
            expected=least,
            advice=advice,
        )
        return Judged(Verdict.FAILED, message, (), (one,))
    return None


def _judged(found: Judgement, topology: Topology, given: JudgeInput, measured: tuple[Measurement, ...]) -> Judged:
    if found.fits:
        return Judged(Verdict.PASSED, f"It fits in {topology}: {found.message}.", measured)
    smallest, tried = given.records["smallest"], ""
    if given.bundle.hardware.accelerator != "cpu":
        tried = " No usual layout fits." if smallest is None else f" The smallest layout that fits is {smallest}."
    one = finding(
        _CODES[found.what],
        f"{found.message[:1].upper()}{found.message[1:]}.",
        pointer="/topology",
        found=found.found,
        expected=found.expected,
        advice=_ADVICE[found.what] + tried,
    )
    return Judged(Verdict.FAILED, f"It does not fit in {topology}: {found.message}.", measured, (one,))


def _measurements(ledgers: list[Ledger], found: Judgement, wanted: int) -> tuple[Measurement, ...]:
    deciding = ledgers[found.stage or 0]
    of_device = {
        "device": deciding.reserve.device_bytes,
        "usable": deciding.reserve.usable_bytes,
        "weights": deciding.weights,
        "cache_room": deciding.room,
        "sequence": deciding.sequence_bytes,
    }
    return (
        *(_number(name, "bytes", value) for name, value in of_device.items()),
        _number("cached_tokens", "tokens", found.cached_tokens),
        _number("sequences", "count", found.sequences, limit=wanted),
    )


def _number(name: str, unit: str, value: int, *, limit: int | None = None) -> Measurement:
    return Measurement(name=name, unit=unit, statistic="value", value=value, n=1, limit=limit)


GATE = Gate(
    name="placement",
    version=1,
    depends_on=("weights", "quantization", "adapters", "draft", "engine", "topology", "hardware", "runtime"),
    measure=measure,
    judge=judge_plan,
)
