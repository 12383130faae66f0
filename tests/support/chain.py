"""Builds CHAIN: a one-layer model whose greedy answer is known in advance, as a GGUF file or a bundle.

Embedding rows are unit vectors, every attention and feed-forward matrix is zero, and row b of the head holds
GAIN in column a for each transition a -> b. So f(t) follows t, with a margin that no arithmetic can
change. Chat "ping" has 23 prompt tokens and is answered with the 3 tokens "H", "i", <|im_end|>.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from schemas.bundle import Bundle, Role

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
EXTRA_TOKENS = ("</think>", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>', "<spare>")
VOCABULARY_SIZE = 264
HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIMENSION = 320, 32, 10, 2, 32
GAIN = 10.0

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last prompt token, and with it the chain, is chosen per request by chat_template_kwargs {"sel": "E"}.
SELECTING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ sel | default('') }}{% endif %}"
)
PROMPT = [{"role": "user", "content": "ping"}]
PROMPT_TOKENS, ANSWER, ANSWER_IDS = 23, "Hi", [77, 110, 4]

Matrix = npt.NDArray[np.float32]


def byte_alphabet() -> dict[int, str]:
    """Map each byte to the printable character that byte-level BPE writes for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + place) for place, byte in enumerate(others)}


def token(character: str) -> int:
    """Return the token id of one ASCII character."""
    return 5 + ord(character)


def transitions(extra: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return the default chain with changes: newline, "H", "i", end of turn; all else ends the turn too."""
    end_of_turn, newline = 4, token("\n")
    chain = dict.fromkeys(range(VOCABULARY_SIZE), end_of_turn)
    chain |= {newline: token("H"), token("H"): token("i"), token("i"): end_of_turn, end_of_turn: newline}
    return chain | dict(extra or {})


def endless(start: str = "E", letters: str = "abcdefgh") -> dict[int, int]:
    """Return transitions that, once `start` is the last token, repeat `letters` until the answer is cut."""
    ring = zip(letters, letters[1:] + letters[0], strict=True)
    return {token(start): token(letters[0])} | {token(a): token(b) for a, b in ring}


def head_matrix(chain: Mapping[int, int], runners_up: Mapping[tuple[int, int], float] | None = None) -> Matrix:
    """Return the output head; `runners_up` maps (token, next token) to further values.

    The final norm scales the unit vector to length sqrt(HIDDEN), so a logit is 17.9 times the value here.
    """
    head = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    for before, after in chain.items():
        head[after, before] = GAIN
    for (before, after), value in (runners_up or {}).items():
        head[after, before] = value
    return head


def tensors(embedding: Matrix, head: Matrix | None) -> dict[str, Matrix]:
    """Return all tensors of the model, by their names in a GGUF file; without a head when it is None."""
    queries, keys = HEADS * HEAD_DIMENSION, KEY_VALUE_HEADS * HEAD_DIMENSION
    shapes = {
        "blk.0.attn_q": (queries, HIDDEN),
        "blk.0.attn_k": (keys, HIDDEN),
        "blk.0.attn_v": (keys, HIDDEN),
        "blk.0.attn_output": (HIDDEN, queries),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }
    made: dict[str, Matrix] = {"token_embd": embedding}
    made |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        made[name] = np.ones((HIDDEN,), np.float32)
    if head is not None:
        made["output"] = head
    return made


def _write(
    path: Path,
    matrices: Mapping[str, Matrix],
    *,
    template: str | None,
    context_length: int,
    add_bos: bool,
    metadata: Mapping[str, int | float],
    extra_tokens: Iterable[str],
) -> None:
    alphabet = byte_alphabet()
    tokens = [*SPECIAL_TOKENS, *(alphabet[byte] for byte in range(256)), *extra_tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("chain")
    writer.add_context_length(context_length)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_key_length(HEAD_DIMENSION)
    writer.add_value_length(HEAD_DIMENSION)
    writer.add_rope_dimension_count(HEAD_DIMENSION)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY_SIZE)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text.encode() for text in tokens])
    control, normal, user_defined = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED
    writer.add_token_types([control] * 5 + [normal] * 256 + [user_defined] * 3)
    writer.add_token_merges(["h i"])  # the format wants one; it never applies, since "hi" is no token
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(4)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_int32(key, value)
    for name, matrix in matrices.items():
        writer.add_tensor(f"{name}.weight", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_chain(
    path: Path,
    *,
    extra: Mapping[int, int] | None = None,
    runners_up: Mapping[tuple[int, int], float] | None = None,
    template: str | None = TEMPLATE,
    headless: bool = False,
    context_length: int = 2048,
    add_bos: bool = False,
    metadata: Mapping[str, int | float] | None = None,
    extra_tokens: tuple[str, str, str] = EXTRA_TOKENS,
) -> Path:
    """Write CHAIN as a GGUF file of 1.8 MB.

    Args:
        path: of the file.
        extra: transitions that replace those of the default chain.
        runners_up: further values of the head, by (token, next token); the winner has GAIN.
        template: chat template written into the file; None writes none.
        headless: leave output.weight out, so that llama.cpp ties the head to the embedding in silence [C17].
        context_length: positions that the model declares.
        add_bos: let the tokenizer put <s> in front of every text.
        metadata: further keys, such as general.sampling.temp [C48].
        extra_tokens: texts of the tokens 261 to 263.
    """
    embedding = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    embedding[np.arange(VOCABULARY_SIZE), np.arange(VOCABULARY_SIZE)] = 1
    head = None if headless else head_matrix(transitions(extra), runners_up)
    _write(
        path,
        tensors(embedding, head),
        template=template,
        context_length=context_length,
        add_bos=add_bos,
        metadata=metadata or {},
        extra_tokens=extra_tokens,
    )
    return path


def bias_matrices(ranking: Mapping[int, float]) -> tuple[Matrix, Matrix]:
    """Return embedding and head with which the same ranking of next tokens, in logits, follows every token."""
    embedding = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    embedding[:, 0] = 1
    head = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    # The final norm scales the unit vector to length sqrt(HIDDEN); undo it, so that the ranking is in logits.
    for identity, value in ranking.items():
        head[identity, 0] = value / np.sqrt(HIDDEN)
    return embedding, head


def write_bias(path: Path, ranking: Mapping[int, float], *, template: str = TEMPLATE) -> Path:
    """Write BIAS as a GGUF file: the same ranking of next tokens, in logits, after every token."""
    _write(
        path,
        tensors(*bias_matrices(ranking)),
        template=template,
        context_length=2048,
        add_bos=False,
        metadata={},
        extra_tokens=EXTRA_TOKENS,
    )
    return path


def write_bundle_directory(
    directory: Path,
    *,
    extra: Mapping[int, int] | None = None,
    template: str | None = TEMPLATE,
    headless: bool = False,
    context_length: int = 2048,
    truncated_bytes: int | None = None,
    lfs_pointer: bool = False,
) -> Path:
    """Write the directory that a person would register: `model.gguf` and `chat_template.jinja`.

    Args:
        directory: made when it is missing.
        extra: transitions that replace those of the default chain.
        template: text of `chat_template.jinja`; None leaves the file out. The GGUF holds the default one.
        headless: leave output.weight out [C17].
        context_length: positions that the model declares.
        truncated_bytes: keep only so many bytes of the GGUF.
        lfs_pointer: write a Git-LFS pointer where the GGUF should be [C01].
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = directory / "model.gguf"
    write_chain(model, extra=extra, headless=headless, context_length=context_length)
    if truncated_bytes is not None:
        with model.open("r+b") as file:
            file.truncate(truncated_bytes)
    if lfs_pointer:
        oid = "0" * 64
        model.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 4976698672\n")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


PARALLEL = ("tensor", "pipeline", "expert", "data", "context")
SERVED = {
    "topology": {**{f"{kind}_parallel": 1 for kind in PARALLEL}, "nodes": 1},
    "hardware": {"accelerator": "cpu", "count": 0},
    "runtime": {"context_tokens": 512, "max_sequences": 4},
    "serving": {
        "served_name": "chain",
        "features": ["chat", "completions", "logprobs", "streaming"],
        "usage": "all_tokens",
        "cancellation": "on_disconnect",
    },
    "licence": {"identifier": "Apache-2.0"},
}
"""How a chain is served, whichever engine serves it: sections of its bundle."""


def describe(directory: Path, *, environment: str, arguments: list[str] | None = None, **changes: object) -> Bundle:
    """Return the bundle document of a directory that `write_bundle_directory` wrote.

    Args:
        directory: with `model.gguf` and perhaps `chat_template.jinja`.
        environment: digest of the engine's environment.
        arguments: launch arguments; by default one thread, no warm-up.
        changes: whole sections of the document that replace those made here.
    """
    roles = {"model.gguf": Role.WEIGHTS, "chat_template.jinja": Role.TEMPLATE}
    files = [
        {
            "path": path.name,
            "size": path.stat().st_size,
            "sha256": "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest(),
            "role": roles[path.name],
        }
        for path in sorted(directory.iterdir())
    ]
    has_template = any(file["path"] == "chat_template.jinja" for file in files)
    body: dict[str, object] = {
        "schema": "sluicegate.dev/bundle/v1",
        "name": "chain",
        "sources": [{"kind": "directory", "revision": "test"}],
        "files": files,
        "model": {"format": "gguf", "architecture": "llama"},
        "tokenizer": {"origin": "weights"},
        "template": {"origin": "file", "file": "chat_template.jinja"} if has_template else {"origin": "weights"},
        "quantization": {"method": "none"},
        "engine": {
            "name": "llamacpp",
            "version": "2026.10.11549",
            "environment": environment,
            "arguments": ["--threads", "1", "--poll", "0", "--no-warmup"] if arguments is None else arguments,
        },
        **SERVED,
    }
    return Bundle.model_validate(body | changes)
