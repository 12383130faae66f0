"""Runs gates on CHAIN variants that the real engine serves."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.gate import GateContext, Rule
from schemas.runner import EngineIdentity
from schemas.suite import AnySuite, GoldenSuite
from tests.support import chain, engine
from workers.launchers.process import Condition

Chain = Mapping[int, int]


def identity(running: engine.RunningEngine, context_tokens: int = 512) -> EngineIdentity:
    """Return what a runner would say about a booted CHAIN."""
    return EngineIdentity(
        name="llamacpp",
        version=running.bundle.engine.version,
        arguments=["llamacpp_server.py"],
        model_ids=[running.model],
        context_tokens=context_tokens,
    )


@contextmanager
def served(
    workdir: Path,
    rule: Rule,
    *,
    extra: Chain | None = None,
    runners_up: Mapping[tuple[int, int], float] | None = None,
    template: str | None = chain.TEMPLATE,
    headless: bool = False,
    add_bos: bool = False,
    metadata: Mapping[str, int | float] | None = None,
    serving: Mapping[str, object] | None = None,
    alias: str | None = None,
) -> Iterator[GateContext]:
    """Write a CHAIN variant, boot it and yield a gate context for it.

    Args:
        workdir: empty directory.
        rule: of the gate that will be run.
        extra: transitions that replace those of the default chain.
        runners_up: further values of the head, by (token, next token); the winner has chain.GAIN.
        template: chat template.
        headless: leave the head out [C17].
        add_bos: let the tokenizer put <s> in front.
        metadata: further GGUF keys.
        serving: fields of the serving contract that replace those of `chain.describe`.
        alias: name that the engine serves under, when it is not the bundle's.
    """
    root = workdir / "bundle"
    root.mkdir(parents=True)
    chain.write_chain(
        root / "model.gguf",
        extra=extra,
        runners_up=runners_up,
        headless=headless,
        add_bos=add_bos,
        metadata=metadata,
    )
    (root / "chat_template.jinja").write_text(template or chain.TEMPLATE, encoding="utf-8")
    plain = chain.describe(root, environment=engine.UNIDENTIFIED)
    contract = plain.serving.model_dump(mode="json") | dict(serving or {})
    bundle = chain.describe(root, environment=engine.UNIDENTIFIED, serving=contract)
    booted = bundle
    if alias is not None:
        booted = chain.describe(root, environment=engine.UNIDENTIFIED, serving=contract | {"served_name": alias})
    running = engine.boot(booted, root, workdir / "run")
    launcher, launched = running.launcher, running.launched

    def process_id() -> int | None:
        return running.pid if launcher.state(launched).condition is Condition.RUNNING else None

    try:
        yield GateContext(
            bundle=bundle,
            root=root,
            rule=rule,
            endpoint=Endpoint(running.base_url, bundle.serving.served_name, LLAMACPP),
            engine=identity(running),
            process_id=process_id,
            ready_ms=100,
        )
    finally:
        launcher.kill(launched)


def suite(*contents: str, max_tokens: int = 8, repeats: int = 2, system: str | None = None) -> GoldenSuite:
    """Return a golden suite with one prompt a text."""
    prompts: list[dict[str, object]] = []
    for place, content in enumerate(contents):
        messages = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        prompts.append({"id": f"p{place}", "messages": messages, "max_tokens": max_tokens})
    return GoldenSuite.model_validate(
        {
            "schema": "sluicegate.dev/suite/golden/v1",
            "name": "golden",
            "prompts": prompts,
            "top_k": 5,
            "repeats": repeats,
        }
    )


def with_suite(context: GateContext, suite: AnySuite, **changes: object) -> GateContext:
    """Return the context with a suite and further changes."""
    return replace(context, suite=suite, **changes)  # type: ignore[arg-type]  # fields of GateContext
