import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.files.refusal import FileRefused
from gates.files.strict_json import MAX_BYTES, load_json, load_object
from schemas.strict_json import NotStrictJson, strict_json


@pytest.mark.parametrize(
    ("raw", "code", "offset", "pointer"),
    [
        (b"", "empty-file", 0, None),
        (b"\xef\xbb\xbf{}", "json-bom", 0, None),
        (b'{"a": 1, "a": 2}', "duplicate-key", None, "/a"),
        (b'{"b": [{}, {"c": {"x": 1, "\\u0078": 2}}]}', "duplicate-key", None, "/b/1/c/x"),
        (b'{"a/b": {"~": 1, "~": 1}}', "duplicate-key", None, "/a~1b/~0"),
        (b'{"a": NaN}', "json-number", None, "/a"),
        (b'{"a": [0, -Infinity]}', "json-number", None, "/a/1"),
        (b'{"a": 1e999}', "json-number", None, "/a"),
        (b'{"a": {"b": %s}}' % (b"1" * 41), "json-number", None, "/a/b"),
        (b'{"a": -%s}' % (b"1" * 100_000), "json-number", None, "/a"),
        (b'{"a": "\\ud800"}', "json-escape", 7, None),
        (b'{"a": "\\udc00\\ud800"}', "json-escape", 7, None),
        (b'{"a": "\\ud83d\\ude00 \\ud83d"}', "json-escape", 20, None),
        (b'{"\\uD800": 1}', "json-escape", 2, None),
        (b'{"a": "\xff"}', "not-utf8", 7, None),
        (b'{"a": "\xed\xa0\x80"}', "not-utf8", 7, None),
        (b"[" * 65 + b"]" * 65, "too-deep", None, None),
        (b'{"a":[' * 33 + b"]}" * 33, "too-deep", None, None),
        (b'{"a": 1} {', "json-syntax", 9, None),
        (b'{"a": 01}', "json-syntax", 7, None),
        (b"{'a': 1}", "json-syntax", 1, None),
        ('{"ä": 1,}'.encode(), "json-syntax", 9, None),
        (b'{"a": "\n"}', "json-syntax", 7, None),
        (b"// no\n{}", "json-syntax", 0, None),
        (b"[" + b"0," * 4_000_001 + b"0]", "too-large", None, None),
        (b"[" + b"[]," * 1_000_001 + b"[]]", "too-large", None, None),
        (b"[" + b'{"a":0},' * 1_000_001 + b"[]]", "too-large", None, None),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "lfs-pointer", 0, None),
        (b"<!doctype html>", "web-page", 0, None),
        (b"\x80\x04K\x01.", "pickle", 0, None),
    ],
    ids=range(30),
)
def test_json_that_parsers_disagree_on_is_refused_at_its_place(tmp_path, raw, code, offset, pointer):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(FileRefused) as refused:
        load_json(path)
    found = refused.value
    assert (found.code, found.offset, found.pointer, found.file) == (code, offset, pointer, "config.json")


def test_a_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(FileRefused) as refused:
        load_json(path)
    assert (refused.value.code, refused.value.found) == ("too-large", str(MAX_BYTES + 1))


def test_an_object_is_asked_for(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[]")
    with pytest.raises(FileRefused) as refused:
        load_object(path)
    assert (refused.value.code, refused.value.found) == ("json-type", "list")


@pytest.mark.parametrize(
    "text",
    [
        '{"model_max_length": 1000000000000000019884624838656}',
        '{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "z": -0.0, "small": 1e-400}',
        '{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": "\\u0120", "d": "\\\\\\ud83d\\ude00"}',
        '{"a": "[[[[[[{{{{", "b": {"c": [[[[]]]]}}',
        '{"": 0, "é": null, "e\u0301": true}',
        "[]",
        "3",
        ' "x" ',
    ],
)
def test_what_published_files_hold_is_read(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert load_json(path) == json.loads(text)


def test_a_tokenizer_of_a_large_vocabulary_is_read_fast(tmp_path):
    count = 131_072
    vocabulary = {f"▁token{n}": n for n in range(count)}
    merges = [[f"▁to{n}", f"ken{n}"] for n in range(count)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary, "merges": merges}}, ensure_ascii=False))
    started = time.process_time()
    assert len(load_object(path)["model"]["vocab"]) == count
    assert time.process_time() - started < 2


def test_a_document_of_the_product_takes_numbers_as_long_as_python_does():
    assert strict_json(b"1" * 4300) == int("1" * 4300)
    with pytest.raises(NotStrictJson, match="more than 4300 digits"):
        strict_json(b"1" * 4301)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, ascii_only=st.booleans())
def test_what_json_can_hold_comes_back(value, ascii_only):
    try:
        raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return  # half a character, which UTF-8 cannot hold
    if ascii_only and json.loads(raw) == value and "\\ud" in json.dumps(value):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            with pytest.raises(NotStrictJson):
                strict_json(raw)
            return
    assert strict_json(raw) == value


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=40) | st.text('{}[]",:0123456789.eE+-\\u\n tfn', max_size=30).map(str.encode))
def test_any_bytes_end_in_a_value_or_a_refusal(raw):
    try:
        value = strict_json(raw, digits=40)
    except NotStrictJson:
        return
    assert json.loads(raw) == value


@settings(max_examples=300, deadline=None)
@given(value=VALUES, depth=st.integers(1, 6))
def test_the_depth_of_any_document_is_counted_right(value, depth):
    def deepest(inner: object) -> int:
        items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else None
        return 0 if items is None else 1 + max(map(deepest, items), default=0)

    raw = json.dumps(value).encode()
    if b"\\ud" in raw:
        return  # half a character may be in it
    if deepest(value) > depth:
        with pytest.raises(NotStrictJson, match="nested deeper"):
            strict_json(raw, depth=depth)
    else:
        assert strict_json(raw, depth=depth) == value


LARGE = {
    "lists": b"[" + b"[]," * 900_000 + b"[]]",
    "objects": b"[" + b'{"a":0},' * 900_000 + b"[]]",
    "texts": b"[" + b'"ab",' * 3_900_000 + b"0]",
    "wide text": b'["' + b"x" * 32_000_000 + "\U0001f600".encode() + b'"]',
}


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_documents_that_are_read_take_bounded_memory(tmp_path, name):
    path = tmp_path / "large.json"
    path.write_bytes(LARGE[name])
    code = (
        "import resource, sys; from pathlib import Path; from gates.files.strict_json import load_json;"
        "resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20)); load_json(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, cwd=Path(__file__).parents[3])
