import json
import threading

import pytest
from sqlalchemy import func, select

from gates.recent import Recent
from registry import documents, evidence, projects
from registry.auth import Actor
from registry.tables import DocumentRow, EntryRow, ProjectDocumentRow
from schemas.bundle import Bundle
from schemas.common import canonical_json, sha256_digest
from schemas.policy import Policy
from schemas.problems import BlobsMissing, Conflict, InvalidDocument, NotFound, PolicyTooWeak, SuiteMissing
from schemas.suite import GoldenSuite, StructuredSuite
from tests.support import structured
from tests.support.api import ROLES, make_tokens
from tests.support.factories import (
    WEIGHTS,
    bundle_body,
    canary_body,
    file_entry,
    golden_body,
    load_body,
    policy_body,
    reference_body,
    registered_bundle,
    registered_golden,
    registered_load,
    registered_policy,
    upload,
)

GATES = policy_body()["gates"]
GOLDEN_RULE = {"gate": "golden", "margin_nat": "0.1", "min_prompts": 2}
LOAD_RULE = {
    "gate": "load",
    "percentile": "0.9",
    "confidence": "0.95",
    "requests": 60,
    "ttft_ms": 1000,
    "tpot_ms": 100,
    "e2e_ms": 5000,
    "attainment_min": "0.5",
    "error_max": "0.1",
    "send_lag_ms": 50,
}


@pytest.fixture
def service(scratch):
    return scratch


def register(service, actor, kind, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with service.database.transaction() as session:
        return documents.register(session, service, actor, kind, raw)


def rows(service):
    with service.database.transaction() as session:
        return tuple(
            session.scalar(select(func.count()).select_from(table))
            for table in (DocumentRow, ProjectDocumentRow, EntryRow)
        )


def refused(service, actor, kind, body, problem=InvalidDocument):
    """The places at which a document is refused; that nothing was stored is checked each time."""
    before = rows(service)
    with pytest.raises(problem) as raised:
        register(service, actor, kind, body)
    assert type(raised.value) is problem
    assert rows(service) == before
    return {place["pointer"]: place["detail"] for place in raised.value.members["errors"]}


def unparsed(kind, body):
    """The places at which a document is refused for what it is, whatever is stored."""
    with pytest.raises(InvalidDocument) as raised:
        documents.parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return {place["pointer"]: place["detail"] for place in raised.value.members["errors"]}


def test_a_document_is_named_by_the_digest_of_its_canonical_form(service, actor):
    upload(service, actor, WEIGHTS)
    loose = json.dumps(bundle_body(), indent=4, sort_keys=False).encode()
    stored, is_new = register(service, actor, "bundle", loose)
    bundle = Bundle.model_validate(bundle_body())
    assert is_new
    assert stored.digest == bundle.digest == sha256_digest(canonical_json(bundle_body()))
    assert stored.serving_digest == bundle.serving_digest
    assert stored.components == bundle.components()
    assert stored.document == bundle_body()
    assert (stored.name, stored.created_by, stored.schema_id) == ("chat", "maria", Bundle.SCHEMA_ID)


@pytest.mark.parametrize(
    ("kind", "body"), [("bundle", bundle_body()), ("policy", policy_body()), ("suite", golden_body())]
)
def test_registering_again_answers_the_same_and_writes_nothing(service, actor, kind, body):
    upload(service, actor, WEIGHTS)
    first, _ = register(service, actor, kind, body)
    before = rows(service)
    spaced = json.dumps(body, indent=1).encode()
    other = Actor(actor.project_id, actor.project, "somebody else", "admin")
    assert register(service, other, kind, spaced) == (first, False)
    assert rows(service) == before


def test_a_structured_suite_and_its_policy_are_registered_and_held_to_their_instances(service, actor):
    suite = structured.suite()
    register(service, actor, "suite", suite.canonical())
    register(service, actor, "policy", policy_body(gates=[*GATES, structured.rule_body(suite.digest)]))
    golden = registered_golden(service, actor)
    places = refused(service, actor, "policy", policy_body(gates=[*GATES, structured.rule_body(golden.digest)]))
    assert StructuredSuite.SCHEMA_ID in places["/gates/2/suite"]
    unfit = structured.suite(structured.item(valid=('{"n":"1"}',)))
    register(service, actor, "suite", unfit.canonical())
    rule = structured.rule_body(unfit.digest)
    places = refused(service, actor, "policy", policy_body(gates=[*GATES, rule]), problem=PolicyTooWeak)
    assert "valid instance 0 of number is refused" in places["/gates/2/suite"]


def test_registering_is_one_entry_in_a_stream_of_the_document(service, actor):
    bundle = registered_bundle(service, actor)
    with service.database.transaction() as session:
        (entry,) = evidence.read(session, f"documents/{actor.project_id}/{bundle.digest}")
    body = evidence.wire(entry).body
    assert (entry.kind, entry.actor, body["digest"]) == ("bundle_registered", "maria", bundle.digest)
    assert body["components"] == bundle.components()


def test_of_two_who_register_one_document_at_once_one_stores_it(api):
    service, actor = api.service, api.actor()
    upload(service, actor, WEIGHTS)
    begin, answers = threading.Barrier(4), []

    def post():
        begin.wait()
        answers.append(register(service, actor, "bundle", bundle_body()))

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(is_new for _, is_new in answers) == [False, False, False, True]
    assert len({stored.model_dump_json() for stored, _ in answers}) == 1
    assert rows(service) == (1, 1, 2 + len(ROLES)), "beside those of the project and each token"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is not JSON"),
        (b"[]", "is a list, and has to be an object"),
        (b'{"schema": 1, "schema": 2}', "has the key 'schema' twice"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100, "nested deeper"),
        (b'{"name": NaN}', "NaN"),
    ],
)
@pytest.mark.parametrize("kind", ["bundle", "policy", "suite", "reference"])
def test_what_is_no_document_is_refused_as_a_whole(kind, raw, said):
    places = unparsed(kind, raw)
    assert set(places) == {""}
    assert said in places[""] or kind == "suite"


@pytest.mark.parametrize(
    ("change", "pointer", "said"),
    [
        ({"colour": "red"}, "/colour", "is no field here; the fields are schema, name"),
        ({"model": {"format": "gguf", "architecture": "llama", "size": 1}}, "/model/size", "is no field here"),
        ({"files": None}, "/files", "is required: sorted by path"),
        (
            {"schema": "sluicegate.dev/bundle/v2"},
            "/schema",
            'is "sluicegate.dev/bundle/v2", and has to be "sluicegate.dev/bundle/v1"',
        ),
        ({"name": "Chat"}, "/name", 'is "Chat", and has to be a name: 1 to 63 of a–z'),
        ({"files": [file_entry("../model.gguf", WEIGHTS, "weights")]}, "/files/0/path", "without empty, '.' or '..'"),
        ({"files": [file_entry("a\\b", WEIGHTS, "weights")]}, "/files/0/path", "characters that bundles do not allow"),
        ({"files": [file_entry("a", WEIGHTS, "documentation")]}, "/files", "none has the role weights"),
        (
            {"files": [file_entry("a", WEIGHTS, "weights") | {"sha256": "md5:0"}]},
            "/files/0/sha256",
            "and 64 of the digits",
        ),
        (
            {"files": [file_entry("a", WEIGHTS, "weights") | {"size": -1}]},
            "/files/0/size",
            "is -1, and has to be at least 0",
        ),
        (
            {"files": [file_entry("a", WEIGHTS, "weights") | {"size": 1.5}]},
            "/files/0/size",
            "is 1.5, and has to be a whole number",
        ),
        ({"files": [file_entry("a", WEIGHTS, "weights") | {"size": 2**53}]}, "/files/0/size", "has to be at most"),
        ({"files": [file_entry("a", WEIGHTS, "poem")]}, "/files/0/role", 'is "poem", which is none of weights, '),
        ({"template": {"origin": "file"}}, "/template", "exactly when origin is 'file'"),
        ({"template": {"origin": "file", "file": "t"}}, "/template", "t is not among the files with role template"),
        (
            {"runtime": {"context_tokens": "512", "max_sequences": 4}},
            "/runtime/context_tokens",
            'is "512", and has to be a whole number',
        ),
        ({"a/b~c": 1}, "/a~1b~0c", "is no field here"),
    ],
)
def test_a_bundle_is_refused_at_the_field_that_is_wrong(change, pointer, said):
    places = unparsed("bundle", bundle_body(**change))
    assert pointer in places, places
    assert said in places[pointer]


@pytest.mark.parametrize(
    ("change", "pointer", "said"),
    [
        ({"gates": [*GATES, {"gate": "astrology"}]}, "/gates/2/gate", 'is "astrology", which is none of integrity, '),
        ({"gates": [*GATES, {"limit": 1}]}, "/gates/2/gate", "is required: one of integrity, "),
        ({"gates": []}, "/gates", "has no items, and needs at least 1"),
        ({"gates": None}, "/gates", "is required"),
        ({"gates": GATES[:1]}, "/gates", "compatibility may not be left out; every other gate may"),
        ({"gates": [*GATES, GATES[0]]}, "/gates", "each gate may stand once"),
        ({"gates": [GATES[0], GATES[1] | {"boot_seconds": 60}]}, "/gates/1/boot_seconds", "decimal number in a string"),
        ({"gates": [*GATES, GOLDEN_RULE]}, "/gates/2/suite", "is required: golden suite"),
        ({"canary": canary_body((1000, 1000, 10_000))}, "/canary/steps", "must rise strictly"),
        ({"canary": canary_body((5000, 1000, 10_000))}, "/canary/steps", "must rise strictly"),
        ({"canary": canary_body((1000,))}, "/canary/steps", "end at 10000"),
        ({"canary": canary_body((10_001,))}, "/canary/steps/0/weight_bp", "is 10001, and has to be at most 10000"),
        ({"canary": canary_body(stop_conditions=[])}, "/canary/stop_conditions", "needs at least 1"),
        (
            {"canary": canary_body(stop_conditions=[{"metric": "vibes"}])},
            "/canary/stop_conditions/0/metric",
            'is "vibes", which is none of error_ratio, ttft',
        ),
        ({"approval": {"required": True}}, "/approval/required", "is true, and has to be a whole number"),
    ],
)
def test_a_policy_is_refused_at_the_field_that_is_wrong(change, pointer, said):
    places = unparsed("policy", policy_body(**change))
    assert pointer in places, places
    assert said in places[pointer]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (golden_body() | {"prompts": [{"id": "a", "messages": [], "max_tokens": 1}]}, "/prompts/0/messages"),
        (golden_body() | {"schema": "sluicegate.dev/suite/riddles/v1"}, "/schema"),
        (load_body() | {"plan": [{"at_us": 0, "prompt": "p9"}]}, "/plan"),
        (load_body() | {"extra": 1}, "/extra"),
    ],
)
def test_a_suite_is_refused_at_the_field_that_is_wrong(body, pointer):
    assert pointer in unparsed("suite", body)


def test_a_bundle_waits_for_its_files(service, actor):
    other = b"template"
    body = bundle_body(
        files=[file_entry("chat.jinja", other, "template"), file_entry("model.gguf", WEIGHTS, "weights")],
        template={"origin": "file", "file": "chat.jinja"},
    )
    upload(service, actor, WEIGHTS)
    places = refused(service, actor, "bundle", body, BlobsMissing)
    assert places == {"/files/0/sha256": "the bytes of chat.jinja have not been uploaded"}
    upload(service, actor, other)
    assert register(service, actor, "bundle", body)[1]


def test_bytes_of_another_project_do_not_count(service, actor):
    registered_bundle(service, actor)
    make_tokens(service, "team-b")
    with service.database.transaction() as session:
        theirs = Actor(projects.named(session, "team-b").id, "team-b", "bo", "engineer")
    refused(service, theirs, "bundle", bundle_body(), BlobsMissing)
    upload(service, theirs, WEIGHTS)
    assert register(service, theirs, "bundle", bundle_body())[1]
    with service.database.transaction() as session:
        assert documents.browse(session, theirs.project_id, "policy", names=[], after=None, limit=9) == []
        policy = registered_policy(service, actor)
        with pytest.raises(NotFound):
            documents.load_policy(session, theirs.project_id, policy.digest)


def test_a_size_that_the_bytes_do_not_have_is_refused(service, actor):
    upload(service, actor, WEIGHTS)
    body = bundle_body(files=[file_entry("model.gguf", WEIGHTS, "weights") | {"size": 5}])
    assert refused(service, actor, "bundle", body) == {"/files/0/size": "model.gguf has 19 bytes, not 5"}


def test_a_policy_needs_its_suites_in_the_project(service, actor):
    golden, load = registered_golden(service, actor), registered_load(service, actor)
    missing = sha256_digest(b"nothing")

    def body(golden_suite, load_suite):
        rules = [GOLDEN_RULE | {"suite": golden_suite}, LOAD_RULE | {"suite": load_suite}]
        return policy_body(gates=[*GATES, *rules])

    assert refused(service, actor, "policy", body(missing, missing), SuiteMissing) == {
        "/gates/2/suite": f"there is no suite {missing}",
        "/gates/3/suite": f"there is no suite {missing}",
    }
    # What is lacking comes first: whether a policy is too weak is known only with its suites.
    one = refused(service, actor, "policy", body(golden.digest, missing) | {"canary": too_few()}, SuiteMissing)
    assert set(one) == {"/gates/3/suite"}
    swapped = refused(service, actor, "policy", body(load.digest, golden.digest))
    assert set(swapped) == {"/gates/2/suite", "/gates/3/suite"}
    assert "sluicegate.dev/suite/golden/v1" in swapped["/gates/2/suite"]
    assert register(service, actor, "policy", body(golden.digest, load.digest))[1]


def too_few():
    return canary_body(steps=[step | {"min_requests": 10} for step in canary_body()["steps"]])


def test_a_policy_that_could_never_decide_is_refused_with_each_reason(service, actor):
    load = registered_load(service, actor, requests=10)
    rule = LOAD_RULE | {"suite": load.digest, "requests": 10}
    places = refused(service, actor, "policy", policy_body(gates=[*GATES, rule], canary=too_few()), PolicyTooWeak)
    assert "/gates/2/requests" in places
    assert any(place.startswith("/canary/steps/0") for place in places)


def test_a_reference_answers_a_suite_of_the_project_with_a_bundle_of_the_project(service, actor):
    bundle, suite = registered_bundle(service, actor), registered_golden(service, actor)
    body = reference_body(suite, bundle.digest)
    nothing = sha256_digest(b"nothing")
    assert set(refused(service, actor, "reference", body | {"bundle": nothing, "suite": nothing})) == {
        "/bundle",
        "/suite",
    }
    fewer = body | {"recordings": body["recordings"][:1]}
    assert set(refused(service, actor, "reference", fewer)) == {"/recordings"}
    load = registered_load(service, actor)
    assert set(refused(service, actor, "reference", body | {"suite": load.digest})) == {"/suite"}
    stored, is_new = register(service, actor, "reference", body)
    assert is_new
    with service.database.transaction() as session:
        assert documents.load_reference(session, actor.project_id, stored.digest).digest == stored.digest


def test_a_document_is_loaded_as_what_it_is(service, actor):
    bundle, policy = registered_bundle(service, actor), registered_policy(service, actor)
    suite = registered_golden(service, actor)
    with service.database.transaction() as session:
        project = actor.project_id
        for _ in range(2):
            assert documents.load_bundle(session, project, bundle.digest) == bundle
            assert documents.load_policy(session, project, policy.digest) == policy
            assert documents.load_suite(session, project, suite.digest) == suite
            documents._recent = Recent(documents.KEPT)
        with pytest.raises(NotFound):
            documents.load_policy(session, project, bundle.digest)
        assert isinstance(documents.load_policy(session, project, policy.digest), Policy)
        assert isinstance(documents.load_suite(session, project, suite.digest), GoldenSuite)


def test_only_the_documents_used_last_are_kept_in_memory():
    recent = Recent(documents.KEPT)
    suite = GoldenSuite.model_validate(golden_body())
    for number in range(documents.KEPT):
        recent.put(str(number), suite)
    assert recent.get("0") is suite
    recent.put("one more", suite)
    kept = [number for number in range(documents.KEPT) if recent.get(str(number)) is not None]
    assert kept == [0, *range(2, documents.KEPT)], "0 was read a moment before, so 1 is the oldest"


def test_a_digest_may_be_cut_short_while_it_is_unique(service, actor):
    bundle = registered_bundle(service, actor)
    digits = bundle.digest.removeprefix("sha256:")
    with service.database.transaction() as session:
        project = actor.project_id
        for named in (bundle.digest, digits, digits[:8], f"sha256:{digits[:12]}"):
            assert documents.get(session, project, "bundle", named).digest == bundle.digest
        for named in (digits[:7], "0" * 12, "0" * 64, "../" * 21 + "x", digits.upper(), f"{digits}0"):
            with pytest.raises(NotFound):
                documents.get(session, project, "bundle", named)
        with pytest.raises(NotFound):
            documents.get(session, project, "policy", digits[:8])


def test_a_beginning_that_two_digests_share_names_neither(session, shared_service):
    project = projects.create(session, shared_service, "default", by="test")
    start = "sha256:abcdef01"
    for place, ending in enumerate("04f"):
        digest = start + ending.rjust(56, "0")
        session.add(DocumentRow(digest=digest, kind="policy", schema_id="x", body=b"{}"))
        session.flush()
        session.add(
            ProjectDocumentRow(
                project_id=project.id,
                digest=digest,
                id=f"00000000-0000-7000-8000-00000000000{place}",
                kind="policy",
                name="x",
                created_at=project.created_at,
                created_by="x",
            )
        )
    session.flush()
    with pytest.raises(Conflict) as refused:
        documents.resolve(session, project.id, "policy", "abcdef01")
    assert len(refused.value.members["digests"]) == 3


def test_lists_go_from_new_to_old_in_pages_and_by_name(api):
    actor = api.actor("manager")
    made = [
        registered_policy(api.service, actor, name=f"p{number % 2}", description=str(number)) for number in range(5)
    ]
    client = api.clients["engineer"]
    first = client.get("/v1/policies", params={"limit": 3}).json()
    second = client.get("/v1/policies", params={"limit": 3, "cursor": first["next"]}).json()
    listed = first["items"] + second["items"]
    assert [one["digest"] for one in listed] == [policy.digest for policy in reversed(made)]
    assert second["next"] is None
    assert {one["document"] for one in listed} == {None}
    named = client.get("/v1/policies", params={"name": "p1"}).json()["items"]
    assert [one["name"] for one in named] == ["p1", "p1"]
    both = client.get("/v1/policies", params={"name": ["p0", "p1"]}).json()["items"]
    assert len(both) == 5


def test_over_http_a_document_is_posted_read_and_posted_again(api):
    actor, client = api.actor(), api.clients["engineer"]
    upload(api.service, actor, WEIGHTS)
    new = client.post("/v1/bundles", json=bundle_body())
    known = client.post("/v1/bundles", json=bundle_body())
    assert (new.status_code, known.status_code) == (201, 200)
    assert new.json() == known.json()
    assert new.headers["location"] == known.headers["location"] == f"/v1/bundles/{new.json()['digest']}"
    for role in ("engineer", "runner"):
        assert api.clients[role].get(new.headers["location"]).json() == new.json() | {"aliases": []}
    assert client.get(f"/v1/bundles/{new.json()['digest'][7:17]}").json() == new.json() | {"aliases": []}


LABELS = {"team": "search", "stage": "trial"}


def test_bundles_are_found_by_all_the_labels_that_are_asked_for_in_pages(api):
    actor = api.actor()
    made = [
        registered_bundle(api.service, actor, f"chat-{place}", labels=labels)
        for place, labels in enumerate([LABELS, {"team": "search"}, None, LABELS | {"team": "ads"}, LABELS])
    ]

    def found(*labels, **more):
        answer = api.clients["viewer"].get("/v1/bundles", params={"label": labels, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def named(page):
        return [one["name"] for one in page["items"]]

    assert named(found("team=search")) == ["chat-4", "chat-1", "chat-0"]
    assert named(found("team=search", "stage=trial")) == ["chat-4", "chat-0"]
    assert named(found("stage=trial", "team=search", name="chat-0")) == ["chat-0"]
    assert named(found("team=nobody")) == []
    first = found("team=search", limit=2)
    assert named(first) == ["chat-4", "chat-1"]
    assert named(found("team=search", limit=2, cursor=first["next"])) == ["chat-0"]
    assert [one["labels"] for one in first["items"]] == [LABELS, {"team": "search"}]
    shown = api.clients["viewer"].get(f"/v1/bundles/{made[0].digest}").json()
    assert shown["labels"] == shown["document"]["labels"] == LABELS


@pytest.mark.parametrize("label", ["team", "Team=x", "team=", "team=a b", "=x", "team=" + "x" * 64])
def test_what_is_no_label_is_refused_in_a_search(api, label):
    answer = api.clients["viewer"].get("/v1/bundles", params={"label": label})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("invalid-document")


def test_a_search_for_two_values_of_one_label_is_refused(api):
    answer = api.clients["viewer"].get("/v1/bundles", params={"label": ["team=a", "team=b"]})
    assert answer.status_code == 422
    assert "two values" in answer.json()["detail"]


@pytest.mark.parametrize(
    "labels", [{}, {"team": ""}, {"": "x"}, {"TEAM": "x"}, {"team": 1}, {f"l{place}": "x" for place in range(33)}]
)
def test_labels_have_one_spelling_and_a_limit(service, actor, labels):
    with pytest.raises(InvalidDocument) as refused:
        register(service, actor, "bundle", bundle_body(labels=labels))
    assert refused.value.members["errors"][0]["pointer"].startswith("/labels")


def test_labels_change_the_bundle_and_nothing_that_is_served():
    bare, labelled = (Bundle.model_validate(bundle_body(labels=labels)) for labels in (None, LABELS))
    assert bare.digest != labelled.digest
    assert bare.serving_digest == labelled.serving_digest


def test_a_dead_man_s_time_is_longer_than_another_controller_needs_to_take_over(service, actor):
    lease = service.settings.release_lease_seconds
    for seconds in ("1", f"{lease:g}"):
        places = refused(service, actor, "policy", policy_body(canary=canary_body(dead_man_seconds=seconds)))
        assert places == {
            "/canary/dead_man_seconds": f"must be more than {lease:g}: so long a canary waits for a controller when "
            "its own was killed"
        }
    more = policy_body(canary=canary_body(dead_man_seconds=f"{lease + 0.1:g}"))
    assert register(service, actor, "policy", more)[1]


def test_what_a_bundle_s_names_and_arguments_show_is_refused_before_its_bytes_are_asked_for(service, actor):
    files = [
        file_entry("all.zip", b"PK", "documentation"),
        file_entry("model.gguf", WEIGHTS, "weights"),
        file_entry("modeling_x.py", b"import os", "tokenizer"),
        file_entry("pytorch_model.bin", b"\x80\x04", "weights"),
    ]
    body = bundle_body(files=files)
    body["engine"]["arguments"] = ["--trust-remote-code"]
    places = refused(service, actor, "bundle", body)
    assert set(places) == {"/files/0/path", "/files/2/path", "/files/3/path", "/engine/arguments"}
    assert places["/files/3/path"].startswith("pytorch_model.bin has the role weights, but is pickled")
    with pytest.raises(InvalidDocument) as raised:
        register(service, actor, "bundle", body)
    codes = [one["code"] for one in raised.value.members["errors"]]
    assert codes == ["archive", "remote-code", "pickle-weights", "remote-code"]
