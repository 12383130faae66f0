"""Two bundles compared: whatever differs is seen, in its part, and nothing else is."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.difference import AFFECTS, DOUBTFUL, PARTS, UNSERVED, diff, part_of
from schemas.bundle import COMPONENTS, READ_BY_ENGINE, Bundle, File, Role
from schemas.common import canonical_json
from tests.support.factories import bundle_body, file_entry

ADAPTER = {
    "name": "tone",
    "files": ["tone/adapter_model.safetensors"],
    "rank": 8,
    "target_modules": ["q_proj", "v_proj"],
}
DIGEST = "sha256:" + "7" * 64


def wide_body():
    """Return a bundle that says something in every section and has a file in every role."""
    files = [
        file_entry("LICENSE", b"terms", "licence"),
        file_entry("README.md", b"read me", "documentation"),
        file_entry("chat_template.jinja", b"{{ messages }}", "template"),
        file_entry("config.json", b"{}", "config"),
        file_entry("draft/model.safetensors", b"draft", "draft"),
        file_entry("generation_config.json", b"{}", "generation_config"),
        file_entry("model.safetensors", b"weights", "weights"),
        file_entry("model.safetensors.index.json", b"{}", "weights_index"),
        file_entry("modeling_x.py", b"pass", "code"),
        file_entry("preprocessor_config.json", b"{}", "processor"),
        file_entry("quantize_config.json", b"{}", "quantization"),
        file_entry("tokenizer.json", b"{}", "tokenizer"),
        file_entry("tone/adapter_model.safetensors", b"adapter", "adapter"),
    ]
    body = bundle_body()
    return body | {
        "description": "A bundle.",
        "labels": {"team": "search"},
        "files": files,
        "model": {"format": "safetensors", "architecture": "llama", "parameters": 7},
        "template": {"origin": "file", "file": "chat_template.jinja", "arguments": {"thinking": True}},
        "adapters": [ADAPTER],
        "draft": {"method": "draft_model", "files": ["draft/model.safetensors"], "tokens": 4},
        "engine": body["engine"]
        | {"arguments": ["--threads", "2"], "remote_code": {"files": ["modeling_x.py"], "reason": "read"}},
        "runtime": body["runtime"] | {"sampling": {"temperature": "0.7"}},
        "licence": {"identifier": "Apache-2.0", "file": "LICENSE"},
    }


def bundle(**changes):
    return Bundle.model_validate(wide_body() | changes)


WIDE = bundle()
SECTIONS = {
    "name": (("other",), "description", "/name"),
    "description": (("Another.", None), "description", "/description"),
    "labels": (({"team": "chat"}, None), "description", "/labels"),
    "sources": (([{"kind": "directory", "revision": "next"}],), "sources", "/sources/0/revision"),
    "model": (({"format": "safetensors", "architecture": "qwen3", "parameters": 7},), "weights", "/model/architecture"),
    "tokenizer": (({"origin": "files"},), "tokenizer", "/tokenizer/origin"),
    "template": (
        ({"origin": "file", "file": "chat_template.jinja", "arguments": {"thinking": 1}},),
        "template",
        "/template/arguments/thinking",
    ),
    "quantization": (({"method": "none", "kv_cache": "fp8"},), "quantization", "/quantization/kv_cache"),
    "adapters": (([ADAPTER | {"rank": 16}], None), "adapters", "/adapters"),
    "draft": ((WIDE.draft.model_dump(exclude_none=True) | {"tokens": 5}, None), "draft", "/draft"),
    "engine": (
        (wide_body()["engine"] | {"version": "next"}, wide_body()["engine"] | {"arguments": []}),
        "engine",
        "/engine",
    ),
    "topology": ((wide_body()["topology"] | {"tensor_parallel": 2},), "topology", "/topology/tensor_parallel"),
    "hardware": (({"accelerator": "cpu", "count": 0, "memory_bytes": 9},), "hardware", "/hardware/memory_bytes"),
    "runtime": (({"context_tokens": 512, "max_sequences": 4},), "runtime", "/runtime/sampling"),
    "serving": ((wide_body()["serving"] | {"served_name": "other"},), "serving", "/serving/served_name"),
    "licence": (({"identifier": "MIT", "file": "LICENSE"},), "licence", "/licence/identifier"),
}
"""Section → other values for it, the part that it belongs to, and where the change begins."""


def test_every_section_is_tried():
    assert SECTIONS.keys() == Bundle.model_fields.keys() - {"schema_id", "files"}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_change_of_any_section_is_seen_in_its_part_and_in_no_other(section):
    values, part, pointer = SECTIONS[section]
    for value in values:
        changed = wide_body() | {section: value}
        found = diff(WIDE, Bundle.model_validate({key: one for key, one in changed.items() if one is not None}))
        assert [change.part for change in found.changed] == [part]
        (change,) = found.changed
        assert change.files == []
        assert change.values
        for one in change.values:
            assert one.pointer.startswith(pointer)
            assert canonical_json(one.was) != canonical_json(one.now)
        assert found.is_served_same == (part in UNSERVED)
        assert not found.is_same
        assert sorted([*found.unchanged, part]) == sorted(PARTS)


@pytest.mark.parametrize("place", range(len(WIDE.files)), ids=[file.path for file in WIDE.files])
def test_a_change_of_any_file_is_seen_in_the_part_of_its_role(place):
    body = wide_body()
    body["files"][place] |= {"sha256": DIGEST, "size": 99}
    file = WIDE.files[place]
    (change,) = diff(WIDE, Bundle.model_validate(body)).changed
    assert change.part == part_of(file)
    assert change.values == []
    (one,) = change.files
    assert (one.path, one.change, one.was.size, one.now.size, one.now.sha256) == (
        *(file.path, "changed", file.size, 99, DIGEST),
    )


def test_every_component_and_role_is_tried():
    assert {part_of(file) for file in WIDE.files} == {
        *(component for component, (roles, _) in COMPONENTS.items() if roles),
        *("licence", "documentation"),
    }
    assert {file.role for file in WIDE.files} == {*Role}
    assert {part for _, part, _ in SECTIONS.values()} | {"documentation", DOUBTFUL} == {*PARTS}


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_digest_of_a_component_is_the_bundle_s_own(component):
    other = bundle(name="other", files=wide_body()["files"][:-1], adapters=None) if component == "adapters" else None
    other = other or changed_in(component)
    (change,) = (one for one in diff(WIDE, other).changed if one.part == component)
    assert (change.was, change.now) == (WIDE.components()[component], other.components()[component])


def changed_in(component):
    section = COMPONENTS[component][1][0]
    return bundle(**{section: SECTIONS[section][0][0]})


def test_files_that_come_go_and_change_their_role_are_told():
    body = wide_body()
    body["files"] = [file for file in body["files"] if file["path"] != "README.md"]
    body["files"] = sorted([*body["files"], file_entry("vocab.json", b"{}", "tokenizer")], key=lambda one: one["path"])
    found = {change.part: change.files for change in diff(WIDE, Bundle.model_validate(body)).changed}
    (gone,), (come,) = found["documentation"], found["tokenizer"]
    assert (gone.change, gone.now, gone.was.role) == ("removed", None, "documentation")
    assert (come.change, come.was, come.now.role) == ("added", None, "tokenizer")

    body = wide_body()
    body["files"][3]["role"] = "documentation"
    found = {change.part: change.files[0].change for change in diff(WIDE, Bundle.model_validate(body)).changed}
    assert found == {"weights": "removed", DOUBTFUL: "added"}


@pytest.mark.parametrize("role", ["documentation", "licence"])
@pytest.mark.parametrize("path", ["generation_config.json", "tokenizer.json", "terms.txt", "x.py"])
def test_a_text_under_a_name_that_an_engine_may_read_is_not_taken_at_its_word(role, path):
    file = File.model_validate(file_entry(path, b"{}", role))
    assert file.role not in READ_BY_ENGINE
    assert part_of(file) == DOUBTFUL
    files = sorted([*bundle_body()["files"], file_entry(path, b"{}", role)], key=lambda one: one["path"])
    found = diff(Bundle.model_validate(bundle_body()), Bundle.model_validate(bundle_body(files=files)))
    assert not found.is_served_same
    assert found.first.serving_digest == found.second.serving_digest, "or this would not be needed"


def test_adapters_and_sources_are_compared_with_their_namesakes():
    first = {"name": "a", "files": ["tone/adapter_model.safetensors"], "rank": 4, "target_modules": ["q_proj"]}
    found = diff(WIDE, bundle(adapters=[first, ADAPTER | {"rank": 16}])).changed[0].values
    assert [(one.pointer, one.was) for one in found] == [("/adapters/0", None), ("/adapters/1/rank", 8)]
    found = diff(bundle(adapters=[first, ADAPTER]), WIDE).changed[0].values
    assert [(one.pointer, one.was, one.now) for one in found] == [("/adapters/0", first, None)]

    hub = {"kind": "huggingface", "location": "x/y", "revision": "1"}
    bucket = {"kind": "s3", "location": "s3://b/p", "revision": "1"}
    (moved,) = diff(bundle(sources=[hub, bucket]), bundle(sources=[bucket, hub])).changed
    assert [(one.pointer, one.was, one.now) for one in moved.values] == [("/sources", [hub, bucket], [bucket, hub])]
    (twice,) = diff(bundle(sources=[hub, hub]), bundle(sources=[hub])).changed
    assert [one.pointer for one in twice.values] == ["/sources"]
    # Of two that have one name, which is which is not known: they are told whole.
    old, new = ([hub | {"revision": one} for one in revisions] for revisions in ("12", "34"))
    (both,) = diff(bundle(sources=old), bundle(sources=new)).changed
    assert [(one.pointer, one.was, one.now) for one in both.values] == [("/sources", old, new)]


def test_a_pointer_into_names_with_slashes_leads_there():
    (change,) = diff(WIDE, bundle(runtime=wide_body()["runtime"] | {"flags": {"a/b~c": "1"}})).changed
    assert [one.pointer for one in change.values] == ["/runtime/flags"]
    flagged = bundle(runtime=wide_body()["runtime"] | {"flags": {"a/b~c": "1"}})
    (change,) = diff(flagged, bundle(runtime=wide_body()["runtime"] | {"flags": {"a/b~c": "2"}})).changed
    assert [(one.pointer, one.was, one.now) for one in change.values] == [("/runtime/flags/a~1b~0c", "1", "2")]


def test_what_each_change_affects_comes_from_one_table():
    assert [*AFFECTS] == [*PARTS]
    assert len(set(AFFECTS.values())) == len(AFFECTS)
    for part in PARTS:
        assert AFFECTS[part].endswith(".")
    (change,) = diff(WIDE, changed_in("topology")).changed
    assert change.affects == AFFECTS["topology"]


CHOICES = st.sets(
    st.sampled_from([(section, place) for section, (values, _, _) in SECTIONS.items() for place in range(len(values))])
)
FILES = st.sets(st.integers(0, len(WIDE.files) - 1))


@st.composite
def bundles(draw):
    body = copy.deepcopy(wide_body())
    for section, place in sorted(draw(CHOICES)):
        body[section] = SECTIONS[section][0][place]
    for place in draw(FILES):
        body["files"][place] |= {"sha256": DIGEST}
    return Bundle.model_validate({key: value for key, value in body.items() if value is not None})


@settings(max_examples=60, deadline=None)
@given(bundles(), bundles())
def test_a_difference_is_complete_symmetric_and_empty_for_one_and_the_same(one, other):
    itself = diff(one, one)
    assert itself.is_same
    assert itself.changed == []
    assert itself.unchanged == [*PARTS]
    there, back = diff(one, other), diff(other, one)
    assert there.is_same == (one.digest == other.digest) == (not there.changed)
    assert [change.part for change in there.changed] == [change.part for change in back.changed]
    for ours, theirs in zip(there.changed, back.changed, strict=True):
        assert (ours.was, ours.now) == (theirs.now, theirs.was)
        assert [file.path for file in ours.files] == [file.path for file in theirs.files]
        assert ours.values or ours.files, "what differs is told, not only that something does"
    served = {change.part for change in there.changed if change.is_served}
    assert served == {name for name, digest in one.components().items() if other.components()[name] != digest}


@pytest.mark.parametrize(
    ("origins", "role", "expected"),
    [
        (("weights", "weights"), "weights", {"tokenizer": "weights", "template": "weights"}),
        (("weights", "none"), "weights", {"tokenizer": "weights"}),
        (("files", "weights"), "weights", {"template": "weights"}),
        (("files", "tokenizer_config"), "weights", {}),
        (("files", "tokenizer_config"), "tokenizer", {"template": "tokenizer"}),
        # Only the configuration beside the weights: the weights are the same, and all that lies in them.
        (("weights", "weights"), "config", {}),
    ],
)
def test_what_lies_in_files_that_differ_is_not_said_to_be_the_same(origins, role, expected):
    body = wide_body()
    body["tokenizer"], body["template"] = ({"origin": origin} for origin in origins)
    other = copy.deepcopy(body)
    for file in other["files"]:
        if file["role"] == role:
            file["sha256"] = DIGEST
    first, second = Bundle.model_validate(body), Bundle.model_validate(other)
    for found in (diff(first, second), diff(second, first)):
        assert {one.part: one.within for one in found.within} == expected
        assert {one.within in one.why and "which differ" in one.why for one in found.within} <= {True}
        told = [change.part for change in found.changed] + [one.part for one in found.within] + found.unchanged
        assert sorted(told) == sorted(PARTS)
    assert diff(first, first).within == []
