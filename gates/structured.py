"""The structured gate: answers under a JSON Schema are instances of it.

An answer of 200 does not say that the schema was understood [C100], nor that each of its keywords is enforced [C103].
Cut by max_tokens is neither valid nor invalid [C107]: it is counted apart. What two validators do not agree on is no
observation. Tools, concurrency and completeness (can every valid instance be reached?) are not measured here.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from gates import stats
from gates.contracts import Contract, readable, suite_faults
from gates.gate import MAX_FINDINGS, Gate, Judged, JudgeInput, Records, clip, errored, finding
from gates.keyword_probes import PROBES
from gates.structured_client import LARGER, measure
from schemas.bundle import COMPONENTS, Feature
from schemas.policy import StructuredRule
from schemas.result import Finding, Measurement, Severity, Verdict
from schemas.suite import StructuredItem, StructuredSuite

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_SPACES = re.compile(r"\s+")
_ANSWERED = frozenset({"ok", "empty"})
_ENGINES_FAULT = frozenset({"http_4xx", "http_5xx", "truncated", "error_event", "malformed", "timeout"})
_ADVICE = {
    "keyword": "Take the keyword out of the contract and check it after parsing, or serve with an engine that has it.",
    "schema": "Send the schema in the form that this engine version reads.",
}


@dataclass(slots=True)
class _Tally:
    blocking: list[Finding] = field(default_factory=list)
    doubtful: list[Finding] = field(default_factory=list)
    noted: list[Finding] = field(default_factory=list)
    answers: int = 0
    finished: int = 0
    valid: int = 0
    cut: int = 0
    cut_again: int = 0
    ran: int = 0
    """Longest run of white space, in bytes."""
    padding: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    keyword_n: Counter[str] = field(default_factory=Counter)
    keyword_k: Counter[str] = field(default_factory=Counter)


def judge(given: JudgeInput) -> Judged:
    """Judge keywords, answers, cuts, white space and the cost of schemas.

    Failed when a keyword of the contract is not enforced, a schema is ignored or refused, an answer is flooded with
    white space or late, a cut is reported as an end, or the share of valid answers is below the limit beyond doubt.
    Errored when suite or records are not whole, or the validators disagree. Inconclusive when the answers cannot
    prove the limits.
    """
    rule, suite, bundle = given.rule, given.suite, given.bundle
    if not isinstance(rule, StructuredRule) or not isinstance(suite, StructuredSuite) or rule.suite != suite.digest:
        return errored("The structured suite that the policy names is not at hand; push it and run the gate again.")
    if Feature.JSON_SCHEMA not in bundle.serving.features:
        message = "The bundle does not promise json_schema, and the policy asks for structured answers."
        advice = "Declare json_schema in serving.features, or take the gate out of the policy."
        return Judged(Verdict.FAILED, message, (), [finding("json-schema-not-declared", message, advice=advice)])
    if faults := [finding("suite-unfit", f"{fault}.", pointer=item) for item, fault in suite_faults(suite)]:
        return errored(faults[0].message, faults[:MAX_FINDINGS])
    records = {record["item"]: record for record in given.records["items"]}
    tally = _Tally()
    used: dict[str, list[str]] = {}
    for item in suite.items:
        contract = Contract(item.json_schema)
        for keyword in contract.keywords:
            used.setdefault(keyword, []).append(item.id)
        if item.id in records:
            _examine(rule, suite, item, contract, records[item.id], tally)
        else:
            message = f"Item {item.id} has no record; run the gate again."
            tally.doubtful.append(finding("record-missing", message, pointer=item.id))
    _examine_keywords(given.records["probes"], used, tally)
    if any(item.logit_bias for item in suite.items):
        message = "The suite steers the model by logit_bias, as callers do not."
        tally.noted.append(finding("logit-bias-used", message, severity=Severity.INFO))
    return _conclude(given, rule, suite, tally)


# ------------------------------------------------------------------------------------------------------- items


def _examine(
    rule: StructuredRule,
    suite: StructuredSuite,
    item: StructuredItem,
    contract: Contract,
    record: Records,
    tally: _Tally,
) -> None:
    answers = record["answers"]
    if sorted(one["number"] for one in answers) != list(range(suite.repeats)):
        message = f"Item {item.id} has not {suite.repeats} answers; run the gate again."
        tally.doubtful.append(finding("record-missing", message, pointer=item.id))
        return
    bad: dict[str, tuple[int, Finding]] = {}
    for one in answers:
        tally.answers += 1
        for found in _read(rule, item, contract, one, record, tally):
            count, first = bad.get(found.code, (0, found))
            bad[found.code] = (count + 1, first)
    for count, first in bad.values():
        message = first.message if count == 1 else f"{first.message.removesuffix('.')} (and {count - 1} more like it)."
        told = first.model_copy(update={"message": clip(message)})
        {"validators-disagree": tally.doubtful, "request-not-made": tally.doubtful}.get(
            first.code, tally.noted if first.severity is Severity.INFO else tally.blocking
        ).append(told)
    _examine_cut(item, contract, record["cut"], tally)
    _examine_padding(rule, item, answers, tally)
    _examine_cost(rule, item, record, tally)


def _read(
    rule: StructuredRule, item: StructuredItem, contract: Contract, one: Records, record: Records, tally: _Tally
) -> Iterator[Finding]:
    answer, name = one["answer"], f"{item.id}/{one['number']}"
    if answer["finish_reason"] == "length":
        tally.cut += 1
        answer = one["again"]
        if answer["finish_reason"] == "length":
            tally.cut_again += 1
            return
    if answer["outcome"] not in _ANSWERED:
        yield _not_answered(rule, item, name, answer)
        return
    checked = contract.check(answer["text"]) if answer["is_whole"] else None
    if checked is None or checked.is_valid is None:
        reason = checked.reason if checked else "the answer is too long to judge"
        message = f"The validators do not agree on answer {name}: {reason}."
        yield finding("validators-disagree", message, pointer=name, found=answer["text"])
        return
    tally.finished += 1
    if checked.is_json:
        tally.keyword_n.update(contract.keywords)
        tally.keyword_k.update(contract.keywords - checked.keywords)
    if checked.is_valid:
        tally.valid += 1
        return
    is_same = answer["text"] == record["plain"]["text"] and not checked.is_json
    code = "schema-ignored" if is_same else "answer-invalid" if checked.is_json else "answer-not-json"
    message = f"Answer {name} is no instance of its schema: {checked.reason}."
    if is_same:
        message = f"Answer {name} is the one that is given without a schema: {checked.reason}."
    yield finding(
        code,
        message,
        # One invalid answer among many is a matter of shares; a schema that changes nothing is not.
        severity=Severity.BLOCK if is_same else Severity.INFO,
        pointer=name,
        found=answer["text"] or "(empty)",
        expected=readable(contract.schema),
        advice=_ADVICE["schema"] if is_same else None,
    )


def _not_answered(rule: StructuredRule, item: StructuredItem, name: str, answer: Records) -> Finding:
    outcome, detail = answer["outcome"], answer["detail"]
    if outcome == "timeout":
        message = f"Answer {name} had not ended after {rule.answer_seconds} s."
        return finding("answer-late", message, pointer=name)
    if outcome == "http_4xx":
        message = f"The engine refuses the schema of {item.id}: {detail}"
        return finding("schema-refused", message, pointer=name, expected=item.json_schema, advice=_ADVICE["schema"])
    code = "request-failed" if outcome in _ENGINES_FAULT else "request-not-made"
    return finding(code, f"Answer {name} did not come: {outcome} {detail}", pointer=name)


def _examine_cut(item: StructuredItem, contract: Contract, cut: Records, tally: _Tally) -> None:
    if cut["outcome"] not in _ANSWERED or cut["finish_reason"] == "length":
        return  # what fails here fails the answers too
    if not contract.check(cut["text"]).is_valid:
        message = f"{item.id}: cut after one token, the answer ends with {cut['finish_reason']} instead of length."
        tally.blocking.append(finding("truncation-hidden", message, pointer=item.id, found=cut["text"] or "(empty)"))


def _examine_padding(rule: StructuredRule, item: StructuredItem, answers: list[Records], tally: _Tally) -> None:
    spaces, size, longest, where = 0, 0, 0, ""
    for one in answers:
        for answer in (one["answer"], one["again"]):
            if answer is None or answer["outcome"] not in _ANSWERED:
                continue
            raw = answer["raw"] or answer["text"]
            run = max((len(found.encode()) for found in _SPACES.findall(raw)), default=0)
            if run > longest:
                longest, where = run, f"{item.id}/{one['number']}"
            spaces += sum(len(found.encode()) for found in _SPACES.findall(_STRING.sub('""', raw)))
            size += len(raw.encode())
    tally.ran = max(tally.ran, longest)
    share = spaces / size if size else 0.0
    tally.padding.append(share)
    advice = "Tell the engine to allow no white space between tokens of JSON, or forbid it in the prompt."
    if longest > rule.whitespace_run_bytes:
        message = f"Answer {where} holds a run of {longest} bytes of white space; {rule.whitespace_run_bytes} may be."
        tally.blocking.append(finding("whitespace-flood", message, pointer=where, found=longest, advice=advice))
    elif share > rule.whitespace_max:
        message = f"{share:.0%} of what {item.id} got is white space; {rule.whitespace_max:.0%} may be."
        tally.blocking.append(
            finding("whitespace-share", message, pointer=item.id, found=f"{share:.3f}", advice=advice)
        )


def _examine_cost(rule: StructuredRule, item: StructuredItem, record: Records, tally: _Tally) -> None:
    plain = [one for one in record["plain_ttft_ms"] if one is not None]
    schema = record["schema_ttft_ms"]
    if len(plain) < len(record["plain_ttft_ms"]) or len(schema) < 2 or None in schema:
        message = f"What the schema of {item.id} costs is not known: a request for it failed; run the gate again."
        tally.doubtful.append(finding("cost-unknown", message, pointer=item.id))
        return
    base, again = median(plain), schema[1:]
    spread = max(max(plain) - min(plain), max(again) - min(again))
    for what, value, limit, values in (
        ("first use", schema[0] - base, rule.compile_cold_ms, tally.cold_ms),
        ("use again", median(again) - base, rule.compile_warm_ms, tally.warm_ms),
    ):
        values.append(max(0.0, round(value, 3)))
        if value > limit:
            message = f"The schema of {item.id} adds {value:.0f} ms to the first token at its {what}; {limit} may be."
            found = finding("schema-slow", message, pointer=item.id, found=f"{value:.0f}", expected=limit)
            # Where like requests differ by more than the limit, the machine is as likely the cause.
            (tally.doubtful if spread > limit else tally.blocking).append(found)


# ---------------------------------------------------------------------------------------------------- keywords


def _examine_keywords(probes: list[Records], used: dict[str, list[str]], tally: _Tally) -> None:
    seen = {probe["keyword"]: probe for probe in probes}
    for keyword, items in sorted(used.items()):
        where = ", ".join(items[:5])
        n, k = tally.keyword_n[keyword], tally.keyword_k[keyword]
        if n and not k:
            message = f"No answer to a schema with {keyword} keeps to it (0 of {n}; used by {where})."
            tally.blocking.append(finding("keyword-broken", message, pointer=keyword, advice=_ADVICE["keyword"]))
        if keyword not in PROBES:
            message = f"Whether the engine enforces {keyword} is not probed; {k} of {n} answers keep to it."
            tally.noted.append(finding("keyword-not-probed", message, severity=Severity.WARN, pointer=keyword))
            continue
        found = _probed(keyword, seen.get(keyword), where)
        if found is not None:
            (tally.blocking if found.severity is Severity.BLOCK else tally.noted).append(found)


def _probed(keyword: str, probe: Records | None, where: str) -> Finding | None:
    probe_schema = PROBES[keyword].schema
    answer = probe["answer"] if probe else None
    if answer is None or answer["outcome"] not in {"ok", "empty", "http_4xx"}:
        reason = "this engine cannot be pushed" if probe is None else probe["problem"] or probe["answer"]["detail"]
        message = f"Whether the engine enforces {keyword} could not be probed: {reason}."
        return finding("keyword-unproved", message, severity=Severity.WARN, pointer=keyword)
    if answer["outcome"] == "http_4xx":
        message = f"The engine refuses {keyword}, which the contract uses ({where}): {answer['detail']}"
        return finding(
            "keyword-refused", message, pointer=keyword, expected=readable(probe_schema), advice=_ADVICE["keyword"]
        )
    is_cut = answer["finish_reason"] == "length"
    if not is_cut and Contract(readable(probe_schema)).check(answer["text"]).is_valid:
        return None
    message = f"The engine accepts {keyword} and does not enforce it; the contract uses it ({where})."
    return finding(
        "keyword-ignored",
        message,
        pointer=keyword,
        found=answer["text"] or "(empty)",
        expected=readable(probe_schema),
        advice=_ADVICE["keyword"],
    )


# -------------------------------------------------------------------------------------------------- conclusion


def _conclude(given: JudgeInput, rule: StructuredRule, suite: StructuredSuite, tally: _Tally) -> Judged:
    undecided = _judge_shares(rule, tally)
    measurements = _measurements(rule, tally)
    tally.noted.sort(key=lambda one: one.severity is Severity.INFO)
    findings = given.manner.bound(tally.blocking + tally.doubtful + tally.noted)
    if tally.blocking:
        more = f" ({len(tally.blocking)} findings block.)" if len(tally.blocking) > 1 else ""
        return Judged(Verdict.FAILED, clip(tally.blocking[0].message + more), measurements, findings)
    if tally.doubtful:
        return errored(tally.doubtful[0].message, findings, measurements)
    if undecided:
        return Judged(Verdict.INCONCLUSIVE, clip(" ".join(undecided)), measurements, findings)
    summary = (
        f"{tally.valid} of {tally.finished} finished answers to {len(suite.items)} schemas are valid, "
        f"{tally.cut} of {tally.answers} were cut, and the engine enforces every keyword that was probed."
    )
    return Judged(Verdict.PASSED, summary, measurements, findings)


def _judge_shares(rule: StructuredRule, tally: _Tally) -> list[str]:
    undecided = []
    invalid, n = tally.finished - tally.valid, tally.finished
    if n == 0:
        undecided.append(f"Not one of {tally.answers} answers ended, so that none can be judged.")
    elif stats.lower_bound(tally.valid, n) < rule.validity_min:
        bound = f"{tally.valid} of {n} answers are valid (lower bound {stats.lower_bound(tally.valid, n):.4f})"
        if stats.at_least(invalid, n, float(1 - rule.validity_min)) <= stats.FAIL_ALPHA and invalid:
            message = f"{bound}; the policy asks for {rule.validity_min}."
            tally.blocking.append(finding("answers-invalid", message))
        else:
            undecided.append(f"{bound}, which does not prove {rule.validity_min}.")
    if tally.answers and stats.upper_bound(tally.cut, tally.answers) > rule.truncation_max:
        message = (
            f"{tally.cut} of {tally.answers} answers were cut by max_tokens, {tally.cut_again} also at {LARGER} times"
        )
        message += f" as many; the policy allows {rule.truncation_max}."
        is_endless = tally.cut_again and (
            stats.at_least(tally.cut_again, tally.answers, float(rule.truncation_max)) <= stats.FAIL_ALPHA
        )
        if is_endless:
            tally.blocking.append(finding("answers-endless", message))
        else:
            undecided.append(message)
    return undecided


def _measurements(rule: StructuredRule, tally: _Tally) -> list[Measurement]:
    found = []
    if n := tally.finished:
        low, limit = stats.lower_bound(tally.valid, n), float(rule.validity_min)
        detectable = stats.minimum_detectable(n, 1 - limit)
        found += [
            _share("valid", tally.valid, n, low=low, limit=limit),
            Measurement(name="invalid_detectable", unit="ratio", statistic="value", value=detectable, n=n),
        ]
    if n := tally.answers:
        high = stats.upper_bound(tally.cut, n)
        found.append(_share("cut", tally.cut, n, high=high, limit=float(rule.truncation_max)))
    run, run_limit = float(tally.ran), float(rule.whitespace_run_bytes)
    for name, unit, values, limit in (
        ("whitespace", "ratio", tally.padding, float(rule.whitespace_max)),
        ("whitespace_run", "bytes", [run] if tally.answers else [], run_limit),
        ("schema_first_use", "ms", tally.cold_ms, float(rule.compile_cold_ms)),
        ("schema_used_again", "ms", tally.warm_ms, float(rule.compile_warm_ms)),
    ):
        if values:
            value = round(max(values), 6)
            found.append(Measurement(name=name, unit=unit, statistic="max", value=value, n=len(values), limit=limit))
    for keyword, n in sorted(tally.keyword_n.items()):
        found.append(_share(f"keyword {keyword}", tally.keyword_k[keyword], n))
    return found


def _share(
    name: str, k: int, n: int, *, low: float | None = None, high: float | None = None, limit: float | None = None
) -> Measurement:
    value = round(k / n, 6)
    return Measurement(
        name=name, unit="ratio", statistic="value", value=value, n=n, k=k, low=low, high=high, limit=limit
    )


GATE = Gate("structured", version=1, depends_on=tuple(COMPONENTS), measure=measure, judge=judge)
