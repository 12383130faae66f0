"""The golden gate: the candidate reads every prompt as the reference did, and answers as the reference did.

T0 compares prompt token ids, exactly: a changed template, tokenizer or beginning-of-text token shows here at no
cost. T2 compares the greedy output token by token. The first difference is accepted only where the reference
itself was undecided, to within the policy's margin, and each side knew the other's token.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from gates.dialects.base import Dialect
from gates.divergence import NO_MARGIN, Divergence, diverge, first_difference, output_token
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.gate import Gate, Judged, JudgeInput, Records, clip, errored, finding
from gates.questions import ask_all, measure, untold
from schemas.bundle import Bundle
from schemas.policy import GoldenRule
from schemas.reference import Noise, OutputToken, Recording, Reference
from schemas.result import Finding, Measurement, Severity, Verdict
from schemas.runner import EngineIdentity
from schemas.short import agreeing, many
from schemas.suite import GoldenSuite

_UNTOLD = "Take the gate `golden` out of the policies of bundles on this engine, or serve them with another one."


@dataclass(slots=True)
class _Tally:
    """What has been found so far, over all prompts."""

    failed: list[Finding] = field(default_factory=list)
    doubtful: list[Finding] = field(default_factory=list)
    noted: list[Finding] = field(default_factory=list)
    same_prompts: int = 0
    compared: int = 0
    same_outputs: int = 0
    tokens: int = 0
    cached: int = 0
    margins: list[Decimal] = field(default_factory=list)
    drifts: list[Decimal] = field(default_factory=list)


def judge(given: JudgeInput) -> Judged:
    """Compare every prompt of the suite with the reference.

    Failed when any prompt's token ids differ, the engine refuses or cuts an answer, an answer is empty, or an
    answer parts from the reference where the reference was decided. Errored when suite or reference is missing or
    cannot serve as a yardstick, or when records are. Inconclusive when the suite has fewer prompts than the rule
    asks for, or the engine does not tell what would be compared.
    """
    rule, suite, reference = given.rule, given.suite, given.reference
    if not isinstance(rule, GoldenRule) or not isinstance(suite, GoldenSuite) or rule.suite != suite.digest:
        return errored("The golden suite that the policy names is not at hand; push it and run the gate again.")
    if (lacks := given.records.get("untold")) is not None:
        message = f"Answers cannot be compared token by token: {lacks}."
        return Judged(Verdict.INCONCLUSIVE, clip(message), (), [finding("tokens-untold", message, advice=_UNTOLD)])
    if reference is None:
        advice = "Record one from an accepted bundle: `sluicegate suite record`."
        return errored("The target has no reference for this suite.", [finding("no-reference", advice, advice=advice)])
    if reasons := list(_unusable(rule, suite, reference)):
        return errored(reasons[0].message, reasons)
    recordings = {recording.prompt: recording for recording in reference.recordings}
    records: dict[str, Records] = {}
    for record in given.records["prompts"]:
        if record["prompt"] in records:
            return errored(f"Prompt {record['prompt']} is recorded twice; run the gate again.")
        records[record["prompt"]] = record
    tally = _Tally()
    if reference.bundle == given.bundle.digest:
        message = "The reference was recorded from this very bundle, so that the comparison shows only its stability."
        tally.noted.append(finding("self-reference", message, severity=Severity.INFO))
    for prompt in suite.prompts:
        if prompt.id in records:
            _examine(rule, recordings[prompt.id], records[prompt.id], tally)
        else:
            message = f"Prompt {prompt.id} has no record; run the gate again."
            tally.doubtful.append(finding("record-missing", message, pointer=prompt.id))
    return _conclude(given, rule, suite, tally)


def _unusable(rule: GoldenRule, suite: GoldenSuite, reference: Reference) -> Iterable[Finding]:
    advice = "Record a new reference from an accepted bundle: `sluicegate suite record`."
    if reference.suite != suite.digest:
        message = "The reference belongs to another suite."
        yield finding("reference-of-another-suite", message, found=reference.suite, expected=suite.digest)
    names = [recording.prompt for recording in reference.recordings]
    if sorted(names) != sorted(prompt.id for prompt in suite.prompts):
        yield finding("reference-incomplete", "The reference does not hold each prompt of the suite once.")
    if reference.noise.repeats < 2:
        message = "The reference was recorded once only, so that its own noise is unknown."
        yield finding("reference-not-repeated", message, found=reference.noise.repeats, expected=2, advice=advice)
    if reference.noise.max_margin_nat > rule.margin_nat:
        message = (
            "The reference is not reproducible: it parted from itself at a margin of "
            f"{reference.noise.max_margin_nat} nat, and the policy accepts {rule.margin_nat}."
        )
        yield finding(
            "reference-not-reproducible",
            message,
            found=reference.noise.max_margin_nat,
            expected=rule.margin_nat,
            advice=advice,
        )


def _examine(rule: GoldenRule, reference: Recording, record: Records, tally: _Tally) -> None:
    name = reference.prompt
    if (problem := record["problem"]) is not None:
        advice = "Look at the engine's log." if problem["of"] == "engine" else "Run the gate again."
        found = finding(
            "request-failed" if problem["of"] == "engine" else "request-not-made",
            f"Prompt {name} got no answer: {problem['detail']}.",
            pointer=name,
            advice=advice,
        )
        (tally.failed if problem["of"] == "engine" else tally.doubtful).append(found)
        return
    ids = record["prompt_ids"]
    position = first_difference(reference.prompt_ids, ids)
    if position is not None:
        tally.failed.append(_prompt_finding(reference, record, position))
        return
    if record["prompt_tokens"] != len(ids):
        message = (
            f"Prompt {name}: the engine counts {record['prompt_tokens']} prompt tokens where it names {len(ids)}, "
            "so that the ids compared are not those it read."
        )
        tally.doubtful.append(finding("prompt-tokens-unproved", message, pointer=name))
        return
    tally.same_prompts += 1
    _compare_output(rule, reference, record, tally)


def _compare_output(rule: GoldenRule, reference: Recording, record: Records, tally: _Tally) -> None:
    name = reference.prompt
    output = [output_token(one) for one in record["output"]]
    if len(output) != record["completion_tokens"]:
        message = (
            f"Prompt {name}: the answer has {record['completion_tokens']} tokens by the engine's count, of which "
            f"{len(output)} were named; the bundle's engine must report the token ids of its output."
        )
        tally.doubtful.append(finding("output-tokens-unproved", message, pointer=name))
        return
    if not output:
        expected = _shown(reference.output[0])
        message = f"Prompt {name} got an empty answer; the reference begins with {expected}."
        tally.failed.append(finding("answer-empty", message, pointer=name, expected=expected))
        return
    tally.compared += 1
    tally.cached += record["cached_tokens"] or 0
    parting = diverge(reference, output)
    common = len(output) if parting is None else parting.position
    tally.tokens += common
    pairs = zip(reference.output[:common], output[:common], strict=True)
    tally.drifts += [abs(mine.logprob - theirs.logprob) for mine, theirs in pairs]
    if parting is None:
        if record["finish_reason"] == reference.finish_reason:
            tally.same_outputs += 1
            return
        message = f"Prompt {name}: the same tokens end with another finish reason."
        found, expected = record["finish_reason"], reference.finish_reason
        tally.failed.append(finding("finish-differs", message, pointer=name, found=found, expected=expected))
        return
    tally.margins.append(parting.margin_nat)
    is_noise = parting.is_noise(rule.margin_nat)
    (tally.noted if is_noise else tally.failed).append(_output_finding(rule, name, parting, is_noise=is_noise))


def _prompt_finding(reference: Recording, record: Records, position: int) -> Finding:
    name, ids, texts = reference.prompt, record["prompt_ids"], record["texts"]

    def shown(sequence: Sequence[int]) -> str:
        if position >= len(sequence):
            return "no token: the prompt ends"
        token = sequence[position]
        return f"token {token} {texts.get(str(token), '')!r}"

    found, expected = shown(ids), shown(reference.prompt_ids)
    doubled = len(ids) > 1 and position == 1 and ids[0] == ids[1] and reference.prompt_ids[1:2] != ids[:1]
    message = (
        f"Prompt {name} is read as other tokens than the reference's: at index {position} {found}, not {expected}."
    )
    advice = "Compare chat template, tokenizer and special tokens with those of the reference's bundle."
    if doubled:
        message = f"Prompt {name} begins twice with {found}; the reference's prompt begins with it once."
        advice = "Template and tokenizer both add the beginning-of-text token: take it out of the template."
    return finding(
        "double-bos" if doubled else "prompt-tokens-differ",
        message,
        pointer=f"{name}/{position}",
        found=found,
        expected=expected,
        advice=advice,
    )


def _output_finding(rule: GoldenRule, name: str, parting: Divergence, *, is_noise: bool) -> Finding:
    found, expected = _shown(parting.candidate), _shown(parting.reference)
    margin = "an unknown margin" if parting.margin_nat == NO_MARGIN else f"{parting.margin_nat} nat"
    message = f"Prompt {name} parts from the reference at output token {parting.position}: {found}, not {expected}"
    if is_noise:
        message += f"; the reference was undecided there ({margin}, {rule.margin_nat} are accepted)."
    elif not parting.is_mutual:
        message += "; one side's token is not among the other's best."
    else:
        message += f"; the reference prefers its own by {margin}, and {rule.margin_nat} are accepted."
    return finding(
        "output-noise" if is_noise else "output-differs",
        message,
        severity=Severity.INFO if is_noise else Severity.BLOCK,
        pointer=f"{name}/{parting.position}",
        found=f"{found}; best: {_best(parting.candidate)}",
        expected=f"{expected}; best: {_best(parting.reference)}",
        advice=None if is_noise else "Compare weights, quantization and engine with those of the reference's bundle.",
    )


def _shown(token: OutputToken | None) -> str:
    return "the end of the answer" if token is None else f"token {token.id} {token.text!r}"


def _best(token: OutputToken | None) -> str:
    return ", ".join(f"{one.id} {one.text!r} {one.logprob}" for one in token.top[:5]) if token else "none"


def _conclude(given: JudgeInput, rule: GoldenRule, suite: GoldenSuite, tally: _Tally) -> Judged:
    total = len(suite.prompts)
    measurements = _measurements(rule, total, tally)
    findings = given.manner.bound(tally.failed + tally.doubtful + tally.noted)
    if tally.failed:
        more = f" ({len(tally.failed)} of {total} prompts fail.)"
        return Judged(Verdict.FAILED, clip(tally.failed[0].message + more), measurements, findings)
    if tally.doubtful:
        return errored(tally.doubtful[0].message, findings, measurements)
    if tally.compared < rule.min_prompts:
        summary = f"{tally.compared} prompts were compared, and the policy asks for {rule.min_prompts}."
        return Judged(Verdict.INCONCLUSIVE, summary, measurements, findings)
    told = _as_before if given.manner.counts_none else _told
    return Judged(Verdict.PASSED, told(tally.compared, tally.same_outputs, rule), measurements, findings)


def _told(compared: int, same: int, rule: GoldenRule) -> str:
    """Return what a pass says: how many prompts and answers are the same, and which others are accepted, if any."""
    if (noise := compared - same) == 0:
        both = f"All {compared} prompts are read as the same tokens and answered with the same ones."
        return both if compared > 1 else "The one prompt is read as the same tokens and answered with the same ones."
    read = f"All {compared} prompts are" if compared > 1 else "The one prompt is"
    return (
        f"{read} read as the same tokens, and {many(same, 'answer', 'is', 'are')} the same token by token; "
        f"{noise} {agreeing(noise, 'parts', 'part')} where the reference was undecided to within {rule.margin_nat} nat."
    )


def _as_before(compared: int, same: int, rule: GoldenRule) -> str:
    """Return what a pass said in earlier versions, with results that are recomputed."""
    return (
        f"All {compared} prompts are read as the same tokens, and {same} answers are the same "
        f"token by token; {compared - same} part where the reference was undecided to within {rule.margin_nat} nat."
    )


def _measurements(rule: GoldenRule, total: int, tally: _Tally) -> list[Measurement]:
    known = [margin for margin in tally.margins if margin != NO_MARGIN]
    compared, drifts = tally.compared, tally.drifts
    measurements = [
        _share("prompts_equal", tally.same_prompts, total),
        _share("outputs_equal", tally.same_outputs, compared),
        Measurement(name="output_tokens_equal", unit="count", statistic="value", value=tally.tokens, n=compared),
        Measurement(name="cached_prompt_tokens", unit="count", statistic="value", value=tally.cached, n=compared),
        Measurement(
            name="divergence_margin",
            unit="nat",
            statistic="max",
            value=float(max(known)) if known else None,
            n=len(tally.margins),
            infinite=len(tally.margins) - len(known),
            limit=float(rule.margin_nat),
        ),
    ]
    if drifts:
        for statistic, value in (("mean", sum(drifts) / len(drifts)), ("max", max(drifts))):
            measurements.append(
                Measurement(
                    name="logprob_difference",
                    unit="nat",
                    statistic=statistic,
                    value=round(float(value), 6),
                    n=len(drifts),
                )
            )
    return measurements


def _share(name: str, k: int, n: int) -> Measurement:
    value = round(k / n, 6) if n else None
    return Measurement(name=name, unit="ratio", statistic="value", value=value, n=n, k=k)


def require_told(dialect: Dialect) -> None:
    """Return when an engine tells what a reference holds. Raises InstrumentError, which says what it does not tell."""
    if lacks := untold(dialect):
        raise InstrumentError(f"Nothing can be recorded: {lacks}. {_UNTOLD}")


def record(
    endpoint: Endpoint,
    suite: GoldenSuite,
    bundle: Bundle,
    *,
    engine: EngineIdentity,
    hardware: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Reference:
    """Record what an accepted bundle answers, `suite.repeats` times, with how it differs from itself (A/A).

    Raises:
        InstrumentError: a prompt got no whole answer, its tokens are not all known, or its prompt was not read as
            the same tokens each time; nothing is recorded then.
    """
    first: dict[str, Recording] = {}
    diverging: set[str] = set()
    widest = Decimal(0)
    for repeat in range(1, suite.repeats + 1):

        def say(line: str, repeat: int = repeat) -> None:
            progress(f"repeat {repeat} of {suite.repeats}: {line}")

        for answer in asyncio.run(ask_all(endpoint, suite, None, say)):
            recording = _recording(answer)
            yardstick = first.setdefault(recording.prompt, recording)
            if recording.prompt_ids != yardstick.prompt_ids:
                raise InstrumentError(
                    f"Prompt {recording.prompt} was read as other tokens in repeat {repeat}: the template depends on "
                    "something outside the request, such as the date. Take that out and record again."
                )
            if (parting := diverge(yardstick, recording.output)) is not None:
                diverging.add(recording.prompt)
                widest = max(widest, parting.margin_nat)
    return Reference(
        schema_id="sluicegate.dev/reference/v1",
        suite=suite.digest,
        bundle=bundle.digest,
        engine=f"{engine.name} {engine.version}",
        hardware=hardware,
        recordings=[first[prompt.id] for prompt in suite.prompts],
        noise=Noise(repeats=suite.repeats, diverging_prompts=len(diverging), max_margin_nat=widest),
    )


def _recording(answer: Records) -> Recording:
    name = answer["prompt"]
    if (problem := answer["problem"]) is not None:
        raise InstrumentError(f"Prompt {name} got no answer to record: {problem['detail']}. Look at the engine's log.")
    output = [output_token(one) for one in answer["output"]]
    if not output or len(output) != answer["completion_tokens"]:
        raise InstrumentError(
            f"Prompt {name}: the engine counts {answer['completion_tokens']} output tokens and names {len(output)}. "
            "A reference needs token ids and log-probabilities of the whole answer."
        )
    if answer["prompt_tokens"] != len(answer["prompt_ids"]):
        raise InstrumentError(
            f"Prompt {name}: the engine counts {answer['prompt_tokens']} prompt tokens where it names "
            f"{len(answer['prompt_ids'])}, so that the prompt's token ids are not proved."
        )
    return Recording(prompt=name, prompt_ids=answer["prompt_ids"], output=output, finish_reason=answer["finish_reason"])


GATE = Gate(
    name="golden",
    version=2,
    depends_on=(
        *("weights", "tokenizer", "template", "quantization", "adapters", "draft", "engine", "topology", "hardware"),
        *("runtime", "serving"),
    ),
    measure=measure,
    judge=judge,
)
