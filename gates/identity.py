"""Who answered: the engine is looked at before and after each gate, and must be the same.

A measurement on one engine says nothing about another. So a gate during which the process, its model ids, its
context or its build changed is errored, whatever it measured; one after which no engine is left cannot pass.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from gates.dialects.base import Malformed
from gates.endpoint import Endpoint, EndpointError
from gates.gate import GateContext, Judged, Records, clip, finding
from schemas.result import Verdict

_NAMES = {"pid": "process", "models": "model ids and context", "facts": "build and settings"}


def look(context: GateContext) -> Records | None:
    """Return what the engine is now, or None for a gate that asks none.

    Returns:
        `pid` (null when it is dead), `models` (id and context, null when it does not say), `facts` (build, slots and
        template, as far as this kind of engine tells them), `problem` (why something is missing, else null).
    """
    if context.endpoint is None:
        return None
    pid = context.process_id()
    seen = asyncio.run(_ask(context.endpoint))
    return {"pid": pid if pid == context.process_id() else None, **seen}


async def _ask(endpoint: Endpoint) -> Records:
    async with endpoint:
        try:
            models = [[model.id, model.context_tokens] for model in await endpoint.models()]
            facts = await endpoint.facts()
        except (EndpointError, Malformed) as error:
            return {"models": None, "facts": None, "problem": clip(str(error), 500)}
    return {"models": models, "facts": facts, "problem": None}


def held_to(judged: Judged, identity: Mapping[str, Any]) -> Judged:
    """Return a verdict, or `errored` when the engine was not one and the same.

    Args:
        judged: what the measurement alone says.
        identity: `before` and `after`, as `look` returned them.
    """
    before, after = identity["before"], identity["after"]
    changed = [name for name in _NAMES if None not in (before[name], after[name]) and before[name] != after[name]]
    if changed:
        what = ", ".join(_NAMES[name] for name in changed)
        message = f"The engine changed while the gate ran: its {what}; run the gate again on one that stays."
        told = {name: (before[name], after[name]) for name in changed}
        found = finding(
            "engine-changed",
            message,
            found={name: now for name, (_, now) in told.items()},
            expected={name: then for name, (then, _) in told.items()},
        )
    elif judged.verdict is Verdict.PASSED and (problem := before["problem"] or after["problem"]):
        message = f"Which engine answered is not known: {problem}; run the gate again."
        found = finding("engine-unknown", message)
    elif judged.verdict is Verdict.PASSED and after["pid"] is None and before["pid"] is not None:
        found = finding("engine-gone", message := "The engine was gone when the gate had ended; run the gate again.")
    else:
        return judged
    return Judged(Verdict.ERRORED, message, judged.measurements, [found, *judged.findings][:500])
