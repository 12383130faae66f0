"""`sluicegate bundle diff` and `bundle impact`: two bundles compared, here or by the service."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gates import difference, text_difference
from gates.difference import shown
from registry.cli.documents import read_bundle, read_policy, resolve
from registry.cli.failures import Exit
from registry.cli.options import Json, examples
from registry.cli.output import Output, size
from registry.cli.profile import connect
from registry.client import Client
from schemas.bundle import Bundle
from schemas.comparison import BundleDiff, BundleImpact, FileState, GateImpact, Side
from schemas.policy import Policy
from schemas.problems import DigestMismatch, NotFound, NotPermitted, TransitionRefused, Unavailable, Usage
from schemas.short import many

DIFF_EXAMPLES = examples(
    "sluicegate bundle diff 3c3aff2a 9c1d77aa",
    "sluicegate bundle diff @champion 9c1d77aa",
    "sluicegate bundle diff --target chat@prod 9c1d77aa --exit-code",
    "sluicegate bundle diff 3c3aff2a bundle.json --json",
)
IMPACT_EXAMPLES = examples(
    "sluicegate bundle impact 3c3aff2a 9c1d77aa",
    "sluicegate bundle impact --target chat@prod 9c1d77aa --policy policy.json",
    "sluicegate bundle impact 3c3aff2a 9c1d77aa --json",
)
_NAMED = "Digest, 8 or more of its digits, @ALIAS, or a file with the document"

First = Annotated[str, typer.Argument(metavar="A", help=f"{_NAMED}; with --target, this is B.")]
Second = Annotated[str | None, typer.Argument(metavar="B", help=f"{_NAMED}.")]
Against = Annotated[
    str | None, typer.Option("--target", "-t", help="Compare with what this target has accepted, in place of A.")
]
ExitCode = Annotated[bool, typer.Option("--exit-code", help="Exit status 1 when they differ.")]
AgainCode = Annotated[bool, typer.Option("--exit-code", help="Exit status 1 when a gate must run again.")]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", "-p", help="Only its gates, by its rules: digest, 8 or more of its digits, or a file."),
]
MOST_FILES = 50
"""Files that are shown to a person; the rest is counted."""
LONGEST_VALUE = 200


def diff(
    first: First,
    second: Second = None,
    target: Against = None,
    exit_code: ExitCode = False,
    as_json: Json = False,
) -> int:
    """Compare two bundles by component: what differs, value by value, and what that can affect.

    Two files are compared here and without a service. Exit status: 0, or with --exit-code 1 when they differ.
    """
    output = Output(as_json=as_json)
    with _compared(first, second, target) as sides:
        found = sides.diff()
        texts = {} if as_json else sides.texts(found)
    output.result(found, lambda out: _say_diff(out, found, texts))
    return Exit.FAILED if exit_code and not found.is_same else Exit.DONE


def impact(
    first: First,
    second: Second = None,
    policy: PolicyName = None,
    target: Against = None,
    exit_code: AgainCode = False,
    as_json: Json = False,
) -> int:
    """List the gates that must run again for B given evidence of A, and those whose evidence carries over, and why.

    It advises and lets nothing pass: a release runs what its policy demands. Of two registered bundles the service
    also says which results A has; a file has none. Exit status: 0, or with --exit-code 1 when a gate must run again.
    """
    output = Output(as_json=as_json)
    with _compared(first, second, target) as sides:
        found = sides.impact(policy)
    output.result(found, lambda out: _say_impact(out, found))
    is_again = any(one.outcome == "again" for one in found.gates)
    return Exit.FAILED if exit_code and is_again else Exit.DONE


# ------------------------------------------------------------------------------------------------ what is compared


@dataclass(frozen=True, slots=True)
class _Sides:
    """Two bundles, each a digest on the service or a document that lies here; `client` where one is on the service."""

    first: str | Bundle
    second: str | Bundle
    client: Client | None

    def diff(self) -> BundleDiff:
        if self.client is not None and isinstance(self.first, str) and isinstance(self.second, str):
            return self.client.bundles.diff(self.first, self.second)
        return difference.diff(self._document(self.first), self._document(self.second))

    def texts(self, found: BundleDiff) -> dict[str, list[str]]:
        """Return path → lines that differ, of small texts that the service has; nothing for whoever may not fetch."""
        told = dict[str, list[str]]()
        if self.client is None or not (isinstance(self.first, str) and isinstance(self.second, str)):
            return told
        compared = [one for part in found.changed for one in part.files if text_difference.is_compared(one)]
        for one in compared[: text_difference.MOST_FILES]:
            if one.was is None or one.now is None:
                continue
            try:
                was, now = (
                    self.client.blobs.read(side.sha256, limit=text_difference.MOST_BYTES) for side in (one.was, one.now)
                )
            except NotPermitted:
                return {}
            except (NotFound, DigestMismatch, Unavailable):
                continue
            told[one.path] = text_difference.lines(was, now)
        return told

    def impact(self, policy: str | None) -> BundleImpact:
        if self.client is not None and isinstance(self.first, str) and isinstance(self.second, str):
            named = None if policy is None else resolve(policy, self.client.policies, read_policy, "policy")
            return self.client.bundles.impact(self.first, self.second, policy=named)
        # Only where it is asked for: the catalogue brings in every gate, and takes a moment.
        from gates import impact as impacts

        first, second = self._document(self.first), self._document(self.second)
        return impacts.impact(first, second, policy=None if policy is None else self._policy(policy))

    def _document(self, side: str | Bundle) -> Bundle:
        if isinstance(side, Bundle):
            return side
        if self.client is None:
            raise TypeError("a digest needs a service")
        return Bundle.model_validate(self.client.bundles.get(side).document)

    def _policy(self, named: str) -> Policy:
        if Path(named).is_file():
            return read_policy(Path(named))
        if self.client is None:
            raise Usage(f"policy {named!r} is no file, and two files are compared without a service")
        found = self.client.policies.get(resolve(named, self.client.policies, read_policy, "policy"))
        return Policy.model_validate(found.document)


@contextmanager
def _compared(first: str, second: str | None, target: str | None) -> Iterator[_Sides]:
    """Yield what two names mean. Raises Usage, TransitionRefused when a target has accepted nothing."""
    if (second is None) == (target is None):
        raise Usage("name two bundles, or one and a --target whose accepted bundle it is compared with")
    names = [one for one in (first, second) if one is not None]
    if target is None and all(Path(one).is_file() for one in names):
        yield _Sides(read_bundle(Path(names[0])), read_bundle(Path(names[1])), None)
        return
    with connect() as client:
        sides = [*([] if target is None else [_accepted(client, target)]), *(_named(client, one) for one in names)]
        yield _Sides(sides[0], sides[1], client)


def _named(client: Client, name: str) -> str | Bundle:
    return read_bundle(Path(name)) if Path(name).is_file() else resolve(name, client.bundles, read_bundle, "bundle")


def _accepted(client: Client, target: str) -> str:
    accepted = client.targets.get(target).stable_bundle
    if accepted is None:
        raise TransitionRefused(f"target {target} has accepted no bundle yet: every gate has to run", target=target)
    return accepted


# ------------------------------------------------------------------------------------------------- what is written


def _say_diff(out: Output, found: BundleDiff, texts: Mapping[str, Sequence[str]]) -> None:
    _say_sides(out, found.first, found.second)
    if found.is_same:
        out.say("the same bundle", "good")
        return
    out.say("")
    out.table(
        ["PART", "DIFFERS IN", "CAN AFFECT"],
        ([one.part, _counted(one.values, one.files), one.affects] for one in found.changed),
    )
    values = [(one.part, change) for one in found.changed for change in one.values]
    if values:
        out.say("")
        out.table(
            ["PART", "VALUE", "WAS", "NOW"],
            (
                [part, change.pointer, shown(change.was, LONGEST_VALUE), shown(change.now, LONGEST_VALUE)]
                for part, change in values
            ),
        )
    files = [(one.part, change) for one in found.changed for change in one.files]
    if files:
        out.say("")
        out.table(
            ["PART", "FILE", "WAS", "NOW"],
            ([part, change.path, _file(change.was), _file(change.now)] for part, change in files[:MOST_FILES]),
        )
    if len(files) > MOST_FILES:
        out.note(f"{many(len(files) - MOST_FILES, 'more file')}, which --json lists")
    for path, lines in texts.items():
        if lines:
            out.say("")
            out.say(f"{path}:")
        for line in lines:
            out.say(f"  {line}", {"+": "good", "-": "bad"}.get(line[:1], "plain"))
    out.say("")
    out.fields([*((one.part, one.why) for one in found.within), ("the same", ", ".join(found.unchanged))])
    if found.is_served_same:
        out.say("nothing that is served differs", "good")


def _say_sides(out: Output, first: Side, second: Side) -> None:
    out.fields([("A", f"{first.name} {first.digest}"), ("B", f"{second.name} {second.digest}")])


def _counted(values: Sequence[object], files: Sequence[object]) -> str:
    said = [(len(values), "value"), (len(files), "file")]
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in said if count)


def _file(state: FileState | None) -> str:
    return "—" if state is None else f"{size(state.size)} {state.sha256[7:19]} {state.role}"


_OUTCOMES = {"again": "run again", "carries": "carries over", "would_carry": "would carry over"}


def _say_impact(out: Output, found: BundleImpact) -> None:
    _say_sides(out, found.first, found.second)
    out.say("")
    out.table(["GATE", "OUTCOME", "FOR", "BECAUSE"], (row for one in found.gates for row in _rows(one)))
    out.say("")
    if found.joint:
        out.table(
            ["TO BE CHECKED TOGETHER", "SINCE", "GATES", "WHAT HAS TO HOLD", "NOT SEEN BY GATES"],
            (
                [one.name, ", ".join(one.because), ", ".join(one.gates) or "none", one.what, one.unseen]
                for one in found.joint
            ),
            spare=("NOT SEEN BY GATES", "WHAT HAS TO HOLD"),
        )
        out.say("")
    out.fields(
        (f"{one.change} changes", f"{', '.join(one.gates)} again; it is in {one.where}")
        for one in found.outside
        if one.gates
    )
    if any(one.held is None and one.outcome == "would_carry" for one in found.gates):
        out.note("whether A has evidence was not looked up: that takes two registered bundles", "warn")
    out.note(found.advice)


def _rows(one: GateImpact) -> Iterator[list[str]]:
    """Yield a line for each reason that decides; that of a result which carries over cites it."""
    for place, (parts, why) in enumerate(one.deciding()):
        head = [one.gate, _OUTCOMES[one.outcome]] if place == 0 else ["", ""]
        yield [*head, ", ".join(parts), why]
    if one.outcome == "carries" and one.held is not None:
        on = f" on {one.held.runner}" if one.held.runner else ""
        at = f"{one.held.recorded_at:%Y-%m-%d %H:%M:%S}Z"
        yield ["", "", "evidence", f"Entry {one.held.entry[7:19]} of {at}{on}; holds for {one.bound_to}."]
