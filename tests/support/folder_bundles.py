"""Bundle documents of safetensors for engines that are not installed here: what their drivers read, without a file."""

from collections.abc import Sequence
from typing import Any

from gates.static.flexible import check_words
from schemas.bundle import Bundle

DIGEST = "sha256:" + "0" * 64
IMAGE = "registry.example/engine@" + DIGEST
VERSIONS = {"sglang": "0.5.9", "trtllm": "1.3.0", "transformers": "5.19.0", "tgi": "3.3.6", "external": "1"}
"""Engine → the version that its recorded answers are of."""


def file(path: str, role: str) -> dict[str, Any]:
    """Return a file's row."""
    return {"path": path, "size": 1, "sha256": DIGEST, "role": role}


FILES = [file("config.json", "config"), file("model.safetensors", "weights"), file("tokenizer.json", "tokenizer")]
GENERATION_CONFIG = file("generation_config.json", "generation_config")
TEMPLATE = file("chat_template.jinja", "template")


def body(engine: str, *, version: str | None = None, files: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the document of a small bundle for an engine, from an image."""
    named = {} if engine == "external" else {"image": IMAGE}
    kinds = ("tensor", "pipeline", "expert", "data", "context")
    return {
        "schema": "sluicegate.dev/bundle/v1",
        "name": "chain",
        "sources": [{"kind": "directory", "revision": "test"}],
        "files": sorted([*FILES, *(files or [])], key=lambda one: str(one["path"])),
        "model": {"format": "safetensors", "architecture": "llama"},
        "tokenizer": {"origin": "files"},
        "template": {"origin": "tokenizer_config"},
        "quantization": {"method": "none"},
        "engine": {"name": engine, "version": version or VERSIONS[engine], **named, "arguments": []},
        "topology": {**{f"{kind}_parallel": 1 for kind in kinds}, "nodes": 1},
        "hardware": {"accelerator": "H100", "count": 1},
        "runtime": {"context_tokens": 4096, "max_sequences": 8},
        "serving": {
            "served_name": "chain",
            "features": ["chat", "completions", "streaming"],
            "usage": "all_tokens",
            "cancellation": "on_disconnect",
        },
        "licence": {"identifier": "Apache-2.0"},
    }


def bundle(
    name: str, /, *, version: str | None = None, files: list[dict[str, Any]] | None = None, **sections: Any
) -> Bundle:
    """Return a bundle for an engine; each section changes the keys that it names, or replaces what is no mapping."""
    made = body(name, version=version, files=files)
    for section, change in sections.items():
        made[section] = {**made[section], **change} if isinstance(change, dict) and section in made else change
    return Bundle.model_validate(made)


def flaws_of(chosen: Bundle, argv: Sequence[str], program: str) -> list[str]:
    """Return what the static gate finds in the words behind a program: nothing, of a line that its engine takes."""
    words = list(argv[argv.index(program) + 1 :])
    return [one.message for one in check_words(chosen.engine.name, words, chosen.engine.version)]
