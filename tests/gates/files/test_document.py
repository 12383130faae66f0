"""A bundle document is held to what directories are held to, whoever wrote it."""

import pytest

from gates.files.document import refuse_document
from schemas.bundle import Bundle
from tests.support.factories import bundle_body, file_entry

IMAGE = "vllm@sha256:" + "1" * 64
CONFIG = ("config.json", "config")


def bundle(*files, engine="vllm", arguments=(), code=(), kind="safetensors", **changes):
    listed = files or (("model.safetensors", "weights"), CONFIG)
    named = {"name": engine, "version": "0.32.0", "image": IMAGE, "arguments": list(arguments)}
    if code:
        named["remote_code"] = {"files": sorted(code), "reason": "read by two people"}
    entries = [file_entry(path, path.encode(), role) for path, role in sorted(listed)]
    model = {"format": kind, "architecture": "llama"}
    return Bundle.model_validate(bundle_body(files=entries, engine=named, model=model, **changes))


def places(one):
    return [(place, refused.code) for place, refused in refuse_document(one)]


WEIGHTS = ("model.safetensors", "weights")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (bundle(("pytorch_model.bin", "weights")), [("/files/0/path", "pickle-weights")]),
        (bundle(WEIGHTS, ("pytorch_model.bin", "documentation")), [("/files/1/path", "pickle-weights")]),
        (bundle(WEIGHTS, ("lora/adapter_model.bin", "adapter")), [("/files/0/path", "pickle-weights")]),
        (bundle(WEIGHTS, ("draft/consolidated.00.pth", "draft")), [("/files/0/path", "pickle-weights")]),
        (bundle(WEIGHTS, ("extra.tar.gz", "documentation")), [("/files/0/path", "archive")]),
        (bundle(WEIGHTS, ("ops.whl", "processor")), [("/files/1/path", "archive")]),
        (bundle(WEIGHTS, ("kernel.so", "processor")), [("/files/0/path", "program")]),
        (bundle(WEIGHTS, ("kernel.so.1", "config")), [("/files/0/path", "program")]),
        (bundle(WEIGHTS, ("modeling_x.py", "config")), [("/files/1/path", "remote-code")]),
        (bundle(WEIGHTS, ("modeling_x.py", "documentation")), [("/files/1/path", "remote-code")]),
        (bundle(WEIGHTS, ("run.sh", "tokenizer")), [("/files/1/path", "remote-code")]),
        (bundle(("model.safetensors", "config"), ("words.xyz", "weights")), [
            ("/files/1/path", "weights-unreadable")
        ]),
        (bundle(("model.gguf", "weights")), [("/files/0/path", "formats-mixed")]),
        (bundle(("model.gguf", "weights"), WEIGHTS), [("/files/0/path", "formats-mixed")]),
        (bundle(engine="llamacpp"), [("/files/1/path", "weights-unreadable")]),
        (bundle(engine="trtllm", kind="gguf"), [("/files/1/path", "formats-mixed")]),
        (bundle(arguments=["--load-format", "pt"]), [("/engine/arguments", "pickle-weights")]),
        (bundle(arguments=["--load-format=npcache"]), [("/engine/arguments", "pickle-weights")]),
        (bundle(arguments=["--trust-remote-code"]), [("/engine/arguments", "remote-code")]),
        (bundle(arguments=["--trust_remote_code=True"]), [("/engine/arguments", "remote-code")]),
        (bundle(arguments=["--trust-remote"]), [("/engine/arguments", "remote-code")]),
        (bundle(arguments=["--load_f", "PT"]), [("/engine/arguments", "pickle-weights")]),
        (bundle(WEIGHTS, ("chat_template.jinja", "documentation")), [("/files/0/path", "role-hides")]),
        (bundle(WEIGHTS, ("generation_config.json", "licence")), [("/files/0/path", "role-hides")]),
        (bundle(("a.safetensors", "documentation"), WEIGHTS), [("/files/0/path", "role-hides")]),
        (bundle(WEIGHTS, ("w.npy", "documentation")), [("/files/1/path", "weights-foreign")]),
        (bundle(WEIGHTS, ("w.npz", "licence")), [("/files/1/path", "weights-foreign")]),
        (bundle(WEIGHTS, ("x.pyz", "documentation")), [("/files/1/path", "archive")]),
        (bundle(WEIGHTS, ("x.pt2", "documentation")), [("/files/1/path", "pickle-weights")]),
        (bundle(WEIGHTS, ("x.cubin", "documentation")), [("/files/1/path", "program")]),
    ],
    ids=lambda one: None if isinstance(one, Bundle) else one[0][1],
)  # fmt: skip
def test_what_a_document_shows_is_refused_at_its_place(made, expected):
    assert places(made) == expected


@pytest.mark.parametrize(
    "made",
    [
        bundle(),
        bundle(WEIGHTS, ("tokenizer.model", "tokenizer"), ("LICENSE", "licence"), ("README.md", "documentation")),
        bundle(("model.gguf", "weights"), kind="gguf", engine="llamacpp"),
        bundle(("model.gguf", "weights"), kind="gguf"),
        bundle(("model.gguf", "weights"), ("mmproj-f16.gguf", "processor"), kind="gguf", engine="llamacpp"),
        bundle(WEIGHTS, ("modeling_x.py", "code"), code=["modeling_x.py"]),
        bundle(WEIGHTS, ("modeling_x.py", "code"), code=["modeling_x.py"], arguments=["--trust-remote-code"]),
        bundle(WEIGHTS, ("lora/adapter_model.safetensors", "adapter"), ("lora/adapter_config.json", "adapter")),
        bundle(WEIGHTS, ("draft/model.safetensors", "draft"), ("draft/config.json", "draft")),
        bundle(arguments=["--load-format", "safetensors", "--trust-remote-code=false"]),
        bundle(("model.gguf", "weights"), ("config.json", "documentation"), kind="gguf", engine="llamacpp"),
    ],
)  # fmt: skip
def test_a_sound_document_is_not_refused(made):
    assert places(made) == []
