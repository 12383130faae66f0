"""Every way in which a weight file is known to be broken or ambiguous, each with its reason and its place."""

import io
import json
import struct
from dataclasses import dataclass

import pytest

from gates.files.refusal import FileRefused
from gates.files.safetensors import MAX_HEADER_BYTES, MAX_TENSORS
from gates.files.weights import read

# ruff: noqa: E501 - a form is a line
from tests.support.headers import gguf, info, numbers, pair, safetensors, tensor, text, texts

FOUR, EIGHT = b"\0" * 4, b"\0" * 8
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"


@dataclass(frozen=True)
class Form:
    """A file, its reason code, and where: an offset (-1 is the end), the bytes at whose place it is, a JSON Pointer."""

    name: str
    raw: bytes
    code: str
    offset: int | bytes | None = None
    pointer: str | None = None


def entry(fields: str, name: str = "a") -> bytes:
    return b'{"%s":{%s}}' % (name.encode(), fields.encode())


DTYPE, SHAPE, OFFSETS = '"dtype":"F32"', '"shape":[1]', '"data_offsets":[0,4]'
SOUND = f"{DTYPE},{SHAPE},{OFFSETS}"
PREFIX = 8 + len('{"a":{')


def of(fields: str, data: bytes = FOUR) -> bytes:
    return safetensors(entry(fields), data)


def named(name: str) -> bytes:
    return safetensors(json.dumps({name: tensor(0, 0)}, ensure_ascii=False).encode())


def length(count: int, rest: bytes = b"{}") -> bytes:
    return struct.pack("<Q", count) + rest


SAFETENSORS = [
    # ------------------------------------------------------------------ the file as a whole
    Form("empty file", b"", "empty-file", 0),
    Form("seven bytes", b"\0" * 7, "header-truncated", 7),
    Form("header of no bytes", length(0, b""), "header-start", 8),
    Form("length 2^64-1", length(2**64 - 1), "header-too-long", 0),
    Form("length 2^63", length(2**63), "header-too-long", 0),
    Form("length 2^40", length(2**40), "header-too-long", 0),
    Form("length 100,000,001", length(100_000_001), "header-too-long", 0),
    Form("length one over the limit", length(MAX_HEADER_BYTES + 1), "header-too-long", 0),
    Form("length one too much", length(3), "header-truncated", 10),
    Form("length one too little", length(len(entry(SOUND)) - 1, entry(SOUND) + FOUR), "json-syntax", 7 + len(entry(SOUND))),
    Form("header cut", safetensors({"a": tensor(0, 4)}, FOUR)[:30], "header-truncated", 30),
    Form("LFS pointer", LFS, "lfs-pointer", 0),
    Form("LFS pointer with CRLF", LFS.replace(b"\n", b"\r\n"), "lfs-pointer", 0),
    Form("pickle", b"\x80\x04\x95" + b"\x40" * 60, "pickle", 0),
    Form("pickle of protocol 0", b"cos\nsystem\n(S'id'\ntR.", "pickle", 0),
    Form("ZIP, as torch.save writes", b"PK\x03\x04\x14\0\0\0\0\0archive/data.pkl", "archive", 0),
    Form("gzip", b"\x1f\x8b\x08" + b"\1" * 20, "archive", 0),
    Form("tar", b"x" * 257 + b"ustar\x0000" + b"\0" * 300, "archive", 0),
    Form("ELF", b"\x7fELF\2\1\1" + b"\1" * 60, "program", 0),
    Form("PE", b"MZ\x90\0\3" + b"\1" * 60, "program", 0),
    Form("script", b"#!/bin/sh\nrm -rf /\n", "program", 0),
    Form("HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 60, "other-format", 0),
    Form("NumPy", b"\x93NUMPY\1\0" + b"v" * 60, "other-format", 0),
    Form("GGUF under another name", gguf(), "other-format", 0),
    Form("web page", b"<!DOCTYPE html>\n<html><head><title>404</title>", "web-page", 0),
    Form("XML answer", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web-page", 0),
    Form("JSON answer", b'{"error":"Repository not found"}', "header-too-long", 0),
    # ------------------------------------------------------------------ the header's JSON
    Form("byte order mark", safetensors(b"\xef\xbb\xbf{}"), "header-start", 8),
    Form("header in UTF-16", safetensors('{"a":{}}'.encode("utf-16-le")), "json-syntax"),
    Form("vertical tab after the header", safetensors(b"{}", pad=b"\x0b"), "header-padding", 10),
    Form("leading space", safetensors(b" {}"), "header-start", 8),
    Form("leading newline", safetensors(b"\n{}"), "header-start", 8),
    Form("list at the top", safetensors(b"[]"), "header-start", 8),
    Form("trailing newline", safetensors(b"{}", pad=b"\n"), "header-padding", 10),
    Form("trailing tab", safetensors(b"{}", pad=b"  \t"), "header-padding", 12),
    Form("trailing NULs", safetensors(b"{}", pad=b"\0" * 6), "header-padding", 10),
    Form("a second document", safetensors(b"{} {}"), "header-padding", 11),
    Form("comment", safetensors(b"{/* */}"), "json-syntax", 9),
    Form("trailing comma", safetensors(entry(SOUND)[:-1] + b",}", FOUR), "json-syntax", 8 + len(entry(SOUND))),
    Form("trailing comma in an entry", of(SOUND + ","), "json-syntax", b"}}"),
    Form("two commas", of(f"{DTYPE},,{SHAPE},{OFFSETS}"), "json-syntax", b',"shape'),
    Form("no comma", of(f"{DTYPE} {SHAPE},{OFFSETS}"), "json-syntax", b'"shape'),
    Form("NaN literal", safetensors(b'{"a":NaN}'), "json-syntax", b"NaN"),
    Form("invalid UTF-8 in a name", safetensors(b'{"\xff":{}}'), "not-utf8", b"\xff"),
    Form("lone surrogate", safetensors(b'{"\\ud800":{%s}}' % SOUND.encode(), FOUR), "json-escape", b"\\ud800"),
    Form("unknown escape", safetensors(b'{"\\q":{%s}}' % SOUND.encode(), FOUR), "json-escape", b"\\q"),
    Form("newline as it is in a name", safetensors(b'{"a\nb":{%s}}' % SOUND.encode(), FOUR), "json-syntax", 9),
    Form("10,000 levels", safetensors(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), "json-syntax", b"[[["),
    Form("an entry that is a number", safetensors(b'{"a":1}'), "json-syntax", b"1}"),
    Form("an entry that is a list", safetensors(b'{"a":[]}'), "json-syntax", b"[]"),
    Form(
        "duplicate tensor key, last entry covers the file",
        safetensors(b'{"a":{"dtype":"I32",%s},"a":{%s}}' % (f"{SHAPE},{OFFSETS}".encode(), SOUND.encode()), FOUR),
        "duplicate-key",
        b'a":{"dtype":"F32',
        "/a",
    ),
    Form(
        "duplicate tensor key, one spelled by an escape",
        safetensors(b'{"a":{%s},"\\u0061":{%s}}' % (SOUND.encode(), SOUND.encode()), FOUR),
        "duplicate-key",
        b"\\u0061",
        "/a",
    ),
    Form(
        "duplicate tensor key, last entry does not cover",
        safetensors(b'{"a":{%s},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' % SOUND.encode(), FOUR),
        "duplicate-key",
        b'a":{"dtype":"F32","shape":[0]',
        "/a",
    ),
    Form("duplicate dtype", of(f"{DTYPE},{SOUND}"), "duplicate-key", PREFIX + 15, "/a/dtype"),
    Form("duplicate shape", of(f"{SOUND},{SHAPE}"), "duplicate-key", PREFIX + len(SOUND) + 2, "/a/shape"),
    # ------------------------------------------------------------------ metadata
    Form("metadata null", safetensors({"__metadata__": None}), "metadata", None, "/__metadata__"),
    Form("metadata of numbers", safetensors({"__metadata__": {"a": 1}}), "metadata", None, "/__metadata__"),
    Form("metadata of objects", safetensors({"__metadata__": {"a": {}}}), "metadata", None, "/__metadata__"),
    Form("metadata like a tensor", safetensors({"__metadata__": tensor(0, 0)}), "tensor-name", 10),
    Form("two __metadata__", safetensors(b'{"__metadata__":{},"__metadata__":{}}'), "duplicate-key", 27, "/__metadata__"),
    Form(
        "duplicate key in metadata",
        safetensors(b'{"__metadata__":{"k":"1","k":"2"}}'),
        "duplicate-key",
        b'k":"2',
        "/__metadata__/k",
    ),
    Form("metadata spelled by an escape", safetensors(b'{"\\u005f_metadata__":{}}'), "metadata", 9, "/__metadata__"),
    Form("metadata without end", safetensors(b'{"__metadata__":{"a":"b"'), "json-syntax", 32),
    Form("metadata too large", safetensors({"__metadata__": {"a": "x" * (9 << 20)}}), "metadata-too-large"),
    # ------------------------------------------------------------------ an entry's fields
    Form("no dtype", of(f"{SHAPE},{OFFSETS}"), "tensor-fields", None, "/a"),
    Form("no shape", of(f"{DTYPE},{OFFSETS}"), "tensor-fields", None, "/a"),
    Form("no offsets", of(f"{DTYPE},{SHAPE}"), "tensor-fields", None, "/a"),
    Form("no field", of(""), "tensor-fields", None, "/a"),
    Form("unknown further field", of(SOUND + ',"extra":1'), "tensor-fields", b"extra", "/a"),
    Form("a field's name by an escape", of('"dt\\u0079pe":"F32"'), "tensor-fields", b"dt\\u", "/a"),
    Form("unknown dtype", of('"dtype":"F33",' + f"{SHAPE},{OFFSETS}"), "dtype-unknown", b"F33", "/a/dtype"),
    Form("lower-case dtype", of('"dtype":"f32",' + f"{SHAPE},{OFFSETS}"), "dtype-unknown", b'"f32', "/a/dtype"),
    Form("null dtype", of('"dtype":null,' + f"{SHAPE},{OFFSETS}"), "dtype-unknown", b"null", "/a/dtype"),
    Form("list as dtype", of('"dtype":["F32"],' + f"{SHAPE},{OFFSETS}"), "dtype-unknown", b'["F32', "/a/dtype"),
    Form("boolean shape", of(f'{DTYPE},"shape":[true],{OFFSETS}'), "shape", b"[true", "/a/shape"),
    Form("negative shape", of(f'{DTYPE},"shape":[-1],{OFFSETS}'), "shape", b"[-1", "/a/shape"),
    Form("fractional shape", of(f'{DTYPE},"shape":[1.0],{OFFSETS}'), "shape", b"[1.0", "/a/shape"),
    Form("text as shape", of(f'{DTYPE},"shape":"1",{OFFSETS}'), "shape", b'"1"', "/a/shape"),
    Form("leading zero in a shape", of(f'{DTYPE},"shape":[01],{OFFSETS}'), "shape", b"[01", "/a/shape"),
    Form("nine dimensions", of(f'{DTYPE},"shape":[1,1,1,1,1,1,1,1,1],{OFFSETS}'), "shape", b"[1,1", "/a/shape"),
    Form("10,000 dimensions", of(f'{DTYPE},"shape":[{"1," * 9999}1],{OFFSETS}'), "shape", b"[1,1", "/a/shape"),
    Form("overflow times zero", of(f'{DTYPE},"shape":[{2**63},0],"data_offsets":[0,0]', b""), "shape", None, "/a/shape"),
    Form("product overflows to 4", of(f'{DTYPE},"shape":[{2**47},{2**17 + 1}],{OFFSETS}'), "tensor-size", b"0,4]"),
    Form("number beyond 64 bits", of(f'{DTYPE},"shape":[{10**30}],{OFFSETS}'), "shape", None, "/a/shape"),
    Form("one offset", of(f'{DTYPE},{SHAPE},"data_offsets":[0]'), "tensor-offsets", b"[0]", "/a/data_offsets"),
    Form("three offsets", of(f'{DTYPE},{SHAPE},"data_offsets":[0,4,8]'), "tensor-offsets", b"[0,4,8", "/a/data_offsets"),
    Form("fractional offsets", of(f'{DTYPE},{SHAPE},"data_offsets":[0.0,4.0]'), "tensor-offsets", b"[0.0"),
    Form("texts as offsets", of(f'{DTYPE},{SHAPE},"data_offsets":["0","4"]'), "tensor-offsets"),
    Form("negative offsets", of(f'{DTYPE},{SHAPE},"data_offsets":[-4,0]'), "tensor-offsets", b"[-4"),
    Form("reversed offsets", of(f'{DTYPE},{SHAPE},"data_offsets":[4,0]'), "tensor-size", b"4,0]"),
    Form("offsets in exponents", of(f'{DTYPE},{SHAPE},"data_offsets":[0,4e0]'), "tensor-offsets", b"[0,4e0"),
    # ------------------------------------------------------------------ where the data is
    Form("shape larger than the range", of(f'{DTYPE},"shape":[2],{OFFSETS}'), "tensor-size", b"0,4]", "/a/data_offsets"),
    Form("shape smaller than the range", of(f'{DTYPE},"shape":[0],{OFFSETS}'), "tensor-size", b"0,4]"),
    Form("dtype wider than the range", of(f'"dtype":"F64",{SHAPE},{OFFSETS}'), "tensor-size", b"0,4]"),
    Form("a type by an escape", of('"dtype":"\\u00463\\u0032",' + f"{SHAPE},{OFFSETS}"), "dtype-unknown", b'"\\u0046'),
    Form("a type of 128 bits", of('"dtype":"C128","shape":[1],"data_offsets":[0,16]', b"\0" * 16), "dtype-unknown"),
    Form("a shape in a shape", of(f'{DTYPE},"shape":[[1]],{OFFSETS}'), "shape", b"[[1"),
    Form("minus zero as offset", of(f'{DTYPE},{SHAPE},"data_offsets":[-0,4]'), "tensor-offsets", b"[-0"),
    Form("duplicate offsets", of(f"{SOUND},{OFFSETS}"), "duplicate-key", None, "/a/data_offsets"),
    Form("empty tensor beyond the file", safetensors({"a": tensor(0, 4), "z": tensor(2**62, 2**62)}, FOUR), "tensor-hole"),
    Form("two files in one", safetensors({"a": tensor(0, 4)}, FOUR) * 2, "data-trailing"),
    Form("odd count of F4", of('"dtype":"F4","shape":[3],"data_offsets":[0,2]', b"\0\0"), "tensor-size", b"0,2]"),
    Form("F6 that fills no bytes", of('"dtype":"F6_E3M2","shape":[3],"data_offsets":[0,3]', b"\0" * 3), "tensor-size"),
    Form(
        "misaligned",
        safetensors({"a": tensor(0, 1, dtype="I8", shape=[1]), "b": tensor(1, 5)}, b"\0" * 5),
        "tensor-alignment",
        b"1,5]",
        "/b/data_offsets",
    ),
    Form("whole overlap", safetensors({"a": tensor(0, 4), "b": tensor(0, 4)}, FOUR), "tensor-overlap", None, "/b/data_offsets"),
    Form("partial overlap", safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12), "tensor-overlap"),
    Form("empty tensor inside another", safetensors({"a": tensor(0, 8), "z": tensor(4, 4)}, EIGHT), "tensor-overlap"),
    Form("hole at the start", safetensors({"a": tensor(4, 8)}, EIGHT), "tensor-hole", None, "/a/data_offsets"),
    Form("hole between", safetensors({"a": tensor(0, 4), "b": tensor(8, 12)}, b"\0" * 12), "tensor-hole"),
    Form("data short", safetensors({"a": tensor(0, 8)}, FOUR), "data-truncated", -1),
    Form("data missing", safetensors({"a": tensor(0, 8)}), "data-truncated", -1),
    Form("offsets beyond the file", safetensors({"a": tensor(0, 2**41, shape=[2**39])}, FOUR), "data-truncated", -1),
    Form("trailing bytes", safetensors({"a": tensor(0, 4)}, FOUR + b"\1\2"), "data-trailing", b"\1\2"),
    Form("appended ZIP", safetensors({"a": tensor(0, 4)}, FOUR + b"PK\x03\x04"), "data-trailing", b"PK"),
    Form("data and no tensor", safetensors({}, FOUR), "data-trailing"),
    # ------------------------------------------------------------------ names and counts
    Form("empty name", named(""), "tensor-name", 10),
    Form("NUL in a name", named("a\0b"), "tensor-name", 10),
    Form("newline in a name", named("a\nb"), "tensor-name", 10),
    Form("right-to-left override", named("a\u202eb"), "tensor-name", 10),
    Form("zero width space", named("a\u200bb"), "tensor-name", 10),
    Form("DEL in a name", named("a\x7f"), "tensor-name", 10),
    Form("variation selector", named("a\ufe0f"), "tensor-name", 10),
    Form("a filler of Hangul", named("a\u3164"), "tensor-name", 10),
    Form("soft hyphen", named("a\u00adb"), "tensor-name", 10),
    Form("no-break space", named("a\u00a0b"), "tensor-name", 10),
    Form("decomposed name", named("e\u0301"), "tensor-name", 10),
    Form("a path out of the folder", named("../../etc/passwd"), "tensor-name", 10),
    Form("an absolute path", named("/etc/passwd"), "tensor-name", 10),
    Form("a path of Windows", named("..\\x"), "tensor-name", 10),
    Form("257 characters", named("x" * 257), "tensor-name", 10),
    Form("a name of 1 MB", named("x" * 1_000_000), "tensor-name", 10),
    Form("space at the end of a name", named("a "), "tensor-name", 10),
    Form("__METADATA__", named("__METADATA__"), "tensor-name", 10),
    Form(
        "too many tensors",
        safetensors(
            b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(MAX_TENSORS + 1)) + b"}"
        ),
        "too-many-tensors",
    ),
]  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def head(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


A = pair(b"a", 4, u32(7))
VALUE = 24 + 8 + 1 + 4  # where the value of a file's first key "a" begins
NO, COUNT, TOTAL = b"split.no", b"split.count", b"split.tensors.count"


def split(no: int, count: int, total: int | None = None) -> tuple[bytes, ...]:
    further = () if total is None else (pair(TOTAL, 5, u32(total)),)
    return pair(NO, 2, struct.pack("<H", no)), pair(COUNT, 2, struct.pack("<H", count)), *further


def one(*shape: int, kind: int = 0, start: int = 0, data: bytes = FOUR, name: bytes = b"t") -> bytes:
    return gguf(tensors=(info(name, shape, start, kind),), data=data)


GGUF = [
    Form("empty file", b"", "empty-file", 0),
    Form("another magic", b"GGML" + b"\0" * 40, "magic", 0),
    Form("cut within the magic", b"GG", "header-truncated", 2),
    Form("magic and no more", b"GGUF", "header-truncated", 4),
    Form("LFS pointer", LFS, "lfs-pointer", 0),
    Form("ZIP", b"PK\x03\x04" + b"\0" * 40, "archive", 0),
    Form("pickle", b"\x80\x02}q\0." + b"\0" * 40, "pickle", 0),
    Form("web page", b"\n <html>\n", "web-page", 0),
    Form("version 0", gguf(version=0), "version", 4),
    Form("version 1", gguf(version=1), "version", 4),
    Form("version 4", gguf(version=4), "version", 4),
    Form("big endian, version 3", gguf(version=0x03000000), "big-endian", 4),
    Form("big endian, magic turned", b"FUGG" + b"\0" * 40, "big-endian", 0),
    Form("2^64-1 tensors", head(2**64 - 1, 0), "too-many-tensors", 8),
    Form("2^40 keys", head(0, 2**40), "too-many-keys", 16),
    Form("keys that are not there", head(0, 3), "header-truncated", 24),
    Form("tensors that are not there", head(1, 0), "header-truncated", 24),
    Form("duplicate key", gguf(A, A), "duplicate-key", 24 + len(A) + 8, "/a"),
    Form("key with a space", gguf(pair(b"a b", 4, u32(7))), "key-name", 32),
    Form("empty key", gguf(pair(b"", 4, u32(7))), "key-name", 32),
    Form("key of 2^63 bytes", head(0, 1) + struct.pack("<Q", 2**63), "text-too-long", 24),
    Form("key that is not UTF-8", gguf(pair(b"\xff", 4, u32(7))), "not-utf8", 32),
    Form("unknown value type", gguf(pair(b"a", 13, b"")), "value-type", VALUE - 4, "/a"),
    Form("truth value 2", gguf(pair(b"a", 7, b"\2")), "truth-value", VALUE, "/a"),
    Form("text of 2^63 bytes", gguf(pair(b"a", 8, struct.pack("<Q", 2**63))), "text-too-long", VALUE, "/a"),
    Form("text longer than the file", gguf(pair(b"a", 8, struct.pack("<Q", 5000))), "header-truncated", VALUE + 8),
    Form(
        "template that is not UTF-8",
        gguf(pair(b"tokenizer.chat_template", 8, text(b"{{ \xff }}"))),
        "not-utf8",
        b"\xff",
        "/tokenizer.chat_template",
    ),
    Form("template that is a number", gguf(pair(b"tokenizer.chat_template", 4, u32(1))), "value-type"),
    Form("architecture that is a number", gguf(pair(b"general.architecture", 4, u32(1))), "value-type"),
    Form("tokens that are numbers", gguf(numbers(b"tokenizer.ggml.tokens", 4, 1, u32(1))), "value-type"),
    Form("token id that is a text", gguf(pair(b"tokenizer.ggml.eos_token_id", 8, text(b"2"))), "value-type"),
    Form("array of 10^9 bytes that are not there", gguf(numbers(b"a", 0, 10**9, b"")), "array-length", VALUE + 4, "/a"),
    Form("array of 100 numbers that are not there", gguf(numbers(b"a", 4, 100, b"")), "array-length", VALUE + 4, "/a"),
    Form("array of 2^61 texts", gguf(numbers(b"a", 8, 2**61, b"")), "array-length", VALUE + 4, "/a"),
    Form("array whose size overflows", gguf(numbers(b"a", 10, 2**61 + 1, b"\0" * 64)), "array-length", VALUE + 4, "/a"),
    Form("array of arrays", gguf(pair(b"a", 9, struct.pack("<IQ", 9, 1))), "array-nested", VALUE, "/a"),
    Form("array of an unknown type", gguf(pair(b"a", 9, struct.pack("<IQ", 99, 1))), "value-type", VALUE, "/a"),
    Form("truth value 2 in an array", gguf(numbers(b"a", 7, 3, b"\0\1\2")), "truth-value", b"\2", "/a"),
    Form("text in an array that is not UTF-8", gguf(texts(b"a", [b"x", b"y\xfe"])), "not-utf8", b"\xfe", "/a"),
    Form("text in an array that is cut", gguf(texts(b"a", [b"x" * 64]))[:-70], "header-truncated"),
    Form("alignment 48", gguf(pair(b"general.alignment", 4, u32(48))), "alignment", None, "/general.alignment"),
    Form("alignment 0", gguf(pair(b"general.alignment", 4, u32(0))), "alignment", None, "/general.alignment"),
    Form("alignment 2^31", gguf(pair(b"general.alignment", 4, u32(2**31))), "alignment"),
    Form("alignment that is a text", gguf(pair(b"general.alignment", 8, text(b"32"))), "value-type"),
    Form("shard 3 of 3, counted from 0", gguf(*split(3, 3, 9)), "split", None, "/split.no"),
    Form("shard of no number", gguf(split(0, 3, 9)[1]), "split", None, "/split.no"),
    Form("shard without the number of all tensors", gguf(*split(0, 3)), "split", None, "/split.tensors.count"),
    Form("shard with more tensors than all", gguf(*split(0, 3, 0), tensors=(info(b"t", (1,)),), data=FOUR), "split"),
    Form("no dimension", one(), "shape", 24 + 8 + 1, "/t"),
    Form("five dimensions", one(1, 1, 1, 1, 1), "shape", 33, "/t"),
    Form("nine dimensions", one(*[1] * 9), "shape", 33, "/t"),
    Form("a dimension of 0", one(0), "shape", 37, "/t"),
    Form("overflowing shape", one(2**40, 2**40), "shape", 37, "/t"),
    Form("product overflows to 1", one(2**63, 2, 1, 2**63 + 1), "shape", 37, "/t"),
    Form("rows that split a block of Q8_0", one(31, kind=8), "shape", 37, "/t"),
    Form("rows that split a block of Q4_K", one(128, 2, kind=12), "shape", 37, "/t"),
    Form("unknown tensor type", one(1, kind=99), "dtype-unknown", 45, "/t"),
    Form("removed tensor type", one(32, kind=5), "dtype-unknown", 45, "/t"),
    Form("offset 2^64-32, which wraps", one(1, start=2**64 - 32), "data-truncated", 49, "/t"),
    Form("offset beyond the file", one(1, start=2**20), "data-truncated", 49, "/t"),
    Form("offset within the file, not first", one(1, start=32, data=b"\0" * 64), "tensor-hole", 49, "/t"),
    Form("offset that is not aligned", one(1, start=4, data=b"\0" * 64), "tensor-alignment", 49, "/t"),
    Form(
        "overlap",
        gguf(tensors=(info(b"t", (16,)), info(b"u", (1,), 32)), data=b"\0" * 96),
        "tensor-overlap",
        None,
        "/u",
    ),
    Form("hole", gguf(tensors=(info(b"t", (1,)), info(b"u", (1,), 64)), data=b"\0" * 96), "tensor-hole", None, "/u"),
    Form(
        "listed in another order than they lie",
        gguf(tensors=(info(b"t", (1,), 32), info(b"u", (1,))), data=b"\0" * 64),
        "tensor-hole",
        None,
        "/t",
    ),
    Form(
        "two tensors of one name",
        gguf(tensors=(info(b"t", (1,)), info(b"t", (1,), 32)), data=b"\0" * 64),
        "duplicate-key",
        None,
        "/t",
    ),
    Form("a tensor's name of 64 bytes", one(1, name=b"a" * 64), "tensor-name", 32),
    Form("right-to-left override in a tensor's name", one(1, name="a\u202e".encode()), "tensor-name", 32),
    Form("a tensor's name that is a path", one(1, name=b"../../x"), "tensor-name", 32),
    Form("a dimension of 2^63 times 0", one(2**63, 0), "shape", 37, "/t"),
    Form("tensor type 2^31", one(1, kind=2**31), "dtype-unknown", 45, "/t"),
    Form("a tensor cut in its dimensions", one(1)[:45], "header-truncated"),
    Form("two files in one", one(1) * 2, "data-trailing"),
    Form("NUL in a key", gguf(pair(b"a\0b", 4, u32(1))), "key-name", 32),
    Form("negative alignment", gguf(pair(b"general.alignment", 5, struct.pack("<i", -32))), "value-type"),
    Form("alignment in floating point", gguf(pair(b"general.alignment", 6, struct.pack("<f", 32.0))), "value-type"),
    Form("types of tokens that are texts", gguf(texts(b"tokenizer.ggml.token_type", [b"a"])), "value-type"),
    Form("scores that are whole numbers", gguf(numbers(b"tokenizer.ggml.scores", 5, 1, u32(1))), "value-type"),
    Form("add_bos_token that is a number", gguf(pair(b"tokenizer.ggml.add_bos_token", 0, b"\1")), "value-type"),
    Form("shard -1", gguf(pair(NO, 3, struct.pack("<h", -1)), *split(0, 3, 3)[1:]), "value-type"),
    Form("shard of none", gguf(*split(0, 0, 0)), "split", None, "/split.no"),
    Form("tensor without a name", one(1, name=b""), "tensor-name", 32),
    Form("NUL in a tensor's name", one(1, name=b"a\0b"), "tensor-name", 32),
    Form("a tensor's name of 4 GB", head(1, 0) + struct.pack("<Q", 2**32), "text-too-long", 24),
    Form("data short", one(2), "data-truncated", -1),
    Form("data missing", one(2, data=b""), "data-truncated", -1),
    Form("appended ZIP", one(8, data=b"\0" * 32 + b"PK\x03\x04"), "data-trailing", b"PK"),
    Form("trailing bytes", one(8, data=b"\0" * 32 + b"\1\2"), "data-trailing", b"\1\2"),
]


def refusal(raw: bytes, name: str) -> FileRefused:
    with pytest.raises(FileRefused) as refused:
        read(io.BytesIO(raw), len(raw), name)
    return refused.value


def check(form: Form, refused: FileRefused) -> None:
    assert refused.code == form.code, str(refused)
    assert refused.offset is not None or refused.pointer is not None
    if form.offset is not None:
        place = form.raw.index(form.offset) if isinstance(form.offset, bytes) else form.offset
        assert refused.offset == (len(form.raw) if place == -1 else place), str(refused)
    if form.pointer is not None:
        assert refused.pointer == form.pointer
    assert str(refused).isprintable()
    for said in (refused.message, refused.found or "", refused.expected or ""):
        assert len(said) < 500


@pytest.mark.parametrize("form", SAFETENSORS, ids=lambda form: form.name)
def test_a_safetensors_file_that_is_broken_or_ambiguous_is_refused_for_its_reason_at_its_place(form):
    check(form, refusal(form.raw, "model.safetensors"))


@pytest.mark.parametrize("form", GGUF, ids=lambda form: form.name)
def test_a_gguf_file_that_is_broken_or_ambiguous_is_refused_for_its_reason_at_its_place(form):
    check(form, refusal(form.raw, "model.gguf"))


def test_the_suite_has_as_many_forms_as_were_asked_for():
    assert len(SAFETENSORS) >= 60
    assert len(GGUF) >= 30


def test_a_pointer_tells_both_sizes():
    refused = refusal(LFS, "model.safetensors")
    assert refused.found == f"{len(LFS)} bytes that declare 4976698672"
