"""Tables of the GGUF format: tensor types, value types, and the keys whose values have a type of their own.

Source: ggml.h, ggml-common.h, gguf.h and llama.h of llama.cpp; docs/gguf.md of ggml.
"""

from typing import Final

BLOCKS: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Number of a tensor's type → name, values in a block, bytes of a block."""

REMOVED: Final = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"} | {
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that llama.cpp once had and does not load any more."""

SCALARS: Final = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
"""Number of a value's type → name, and its code in `struct` and `array`."""
BOOL, STRING, ARRAY = 7, 8, 9

TEXT_KEYS: Final = frozenset(
    {
        *("general.architecture", "general.name", "general.license", "general.type"),
        *("tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre", "adapter.type"),
    }
)
WHOLE_KEYS: Final = frozenset(
    {
        *("general.alignment", "general.file_type", "general.quantization_version"),
        *("split.no", "split.count", "split.tensors.count"),
    }
)
ID_KEYS: Final = frozenset(
    f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
)
"""Ids of tokens; some converters write −1 for none."""
TRUTH_KEYS: Final = frozenset(
    f"tokenizer.ggml.{name}" for name in ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix")
)
ARRAY_KEYS: Final = {
    "tokenizer.ggml.tokens": {"string"},
    "tokenizer.ggml.merges": {"string"},
    "tokenizer.ggml.token_type": {"i32", "u32"},
    "tokenizer.ggml.scores": {"f32"},
}
"""Keys that engines and this product read, by what they must hold. Others may hold anything."""

FILE_TYPES: Final = {
    0: ("none", 32),
    1: ("none", 16),
    2: ("q4_0", 4),
    3: ("q4_1", 4),
    7: ("q8_0", 8),
    8: ("q5_0", 5),
    9: ("q5_1", 5),
    10: ("q2_k", 2),
    11: ("q3_k_s", 3),
    12: ("q3_k_m", 3),
    13: ("q3_k_l", 3),
    14: ("q4_k_s", 4),
    15: ("q4_k_m", 4),
    16: ("q5_k_s", 5),
    17: ("q5_k_m", 5),
    18: ("q6_k", 6),
    19: ("iq2_xxs", 2),
    20: ("iq2_xs", 2),
    21: ("q2_k_s", 2),
    22: ("iq3_xs", 3),
    23: ("iq3_xxs", 3),
    24: ("iq1_s", 1),
    25: ("iq4_nl", 4),
    26: ("iq3_s", 3),
    27: ("iq3_m", 3),
    28: ("iq2_s", 2),
    29: ("iq2_m", 2),
    30: ("iq4_xs", 4),
    31: ("iq1_m", 1),
    32: ("none", 16),
    36: ("tq1_0", 1),
    37: ("tq2_0", 2),
    38: ("mxfp4", 4),
    39: ("nvfp4", 4),
    40: ("q1_0", 1),
}
"""`general.file_type` → what people call the quantization, and its bits a weight."""
