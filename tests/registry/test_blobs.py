import threading

import httpx
import pytest
from sqlalchemy import func, select

from registry import blobs
from registry.storage.local import LocalBlobs
from registry.tables import BlobRow, ProjectBlobRow
from schemas.common import sha256_digest
from schemas.problems import NotFound
from tests.support.api import make_tokens

CONTENT = b"some bytes of a model" * 1000
DIGEST = sha256_digest(CONTENT)
LIMIT = 2**20


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_stored_file_is_for_reading_only(tmp_path):
    store = LocalBlobs(tmp_path / "blobs")
    store.put([CONTENT], DIGEST, limit=LIMIT)
    assert store.path(DIGEST).stat().st_mode & 0o777 == 0o444


def counted(service):
    with service.database.transaction() as session:
        return tuple(session.scalar(select(func.count()).select_from(table)) for table in (BlobRow, ProjectBlobRow))


def test_a_blob_is_uploaded_once_and_read_back(api):
    client = api.clients["engineer"]
    assert client.post("/v1/blobs/missing", json={"digests": [DIGEST, DIGEST]}).json() == {"missing": [DIGEST]}
    assert client.head(f"/v1/blobs/{DIGEST}").status_code == 404
    new = client.put(f"/v1/blobs/{DIGEST}", content=CONTENT)
    known = client.put(f"/v1/blobs/{DIGEST}", content=iter([CONTENT[:50], CONTENT[50:]]))
    assert (new.status_code, known.status_code) == (201, 200)
    assert new.json() == known.json() == {"digest": DIGEST, "size": len(CONTENT)}
    assert client.post("/v1/blobs/missing", json={"digests": [DIGEST]}).json() == {"missing": []}
    for role in ("engineer", "runner"):
        head, got = api.clients[role].head(f"/v1/blobs/{DIGEST}"), api.clients[role].get(f"/v1/blobs/{DIGEST}")
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(CONTENT))
        assert got.content == CONTENT
    assert counted(api.service) == (1, 1)


@pytest.mark.parametrize("sent", [CONTENT[:-1], b"", CONTENT + b"!"])
def test_bytes_with_another_digest_are_refused_and_nothing_is_stored(api, tmp_path, sent):
    refused = api.clients["engineer"].put(f"/v1/blobs/{DIGEST}", content=sent)
    assert refused.status_code == 422
    assert refused.json()["type"].endswith("/digest-mismatch")
    assert refused.json()["expected"] == DIGEST
    assert refused.json()["received"] == sha256_digest(sent)
    assert counted(api.service) == (0, 0)
    assert files(tmp_path / "blobs") == []


def test_an_upload_that_breaks_off_leaves_nothing(api, tmp_path):
    def cut():
        yield CONTENT[:10_000]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        api.clients["engineer"].put(f"/v1/blobs/{DIGEST}", content=cut())
    # The next request is served after the server has seen the end of the broken one.
    assert api.clients["engineer"].head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert counted(api.service) == (0, 0)
    assert [name for name in files(tmp_path / "blobs") if name.startswith("sha256/")] == []


def test_another_projects_bytes_do_not_show_until_they_are_proved_again(api):
    ours = api.clients["engineer"]
    ours.put(f"/v1/blobs/{DIGEST}", content=CONTENT)
    with api.client(make_tokens(api.service, "team-b")["engineer"]) as theirs:
        unknown = sha256_digest(b"never seen")
        assert theirs.post("/v1/blobs/missing", json={"digests": [DIGEST, unknown]}).json() == {
            "missing": [DIGEST, unknown]
        }
        answers = [theirs.get(f"/v1/blobs/{digest}") for digest in (DIGEST, unknown)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].json()["detail"].replace(DIGEST, unknown) == answers[1].json()["detail"]
        assert theirs.put(f"/v1/blobs/{DIGEST}", content=CONTENT[:-1]).status_code == 422
        assert theirs.head(f"/v1/blobs/{DIGEST}").status_code == 404
        assert theirs.put(f"/v1/blobs/{DIGEST}", content=CONTENT).status_code == 201
        assert theirs.get(f"/v1/blobs/{DIGEST}").content == CONTENT
    assert counted(api.service) == (1, 2)


def test_a_blob_above_the_limit_is_refused_before_it_is_read_and_while_it_is(api, service):
    limited = service.settings.model_copy(update={"max_blob_bytes": 1000})
    object.__setattr__(service, "settings", limited)
    client = api.clients["engineer"]
    announced = client.put(f"/v1/blobs/{DIGEST}", content=CONTENT)
    streamed = client.put(f"/v1/blobs/{DIGEST}", content=iter([CONTENT]))
    for refused in (announced, streamed):
        assert refused.status_code == 413
        assert refused.json()["limit"] == 1000
    assert counted(service) == (0, 0)


def test_a_blob_that_the_store_lost_is_a_problem_not_a_broken_answer(api, service):
    client = api.clients["engineer"]
    client.put(f"/v1/blobs/{DIGEST}", content=CONTENT)
    service.blobs.path(DIGEST).unlink()
    lost = client.get(f"/v1/blobs/{DIGEST}")
    assert lost.status_code == 404
    assert "the store has no blob" in lost.json()["detail"]


def test_many_uploads_at_once_do_not_keep_others_waiting(api):
    """More slow uploads than there are threads for them, and a question in between."""
    release = threading.Event()

    def slow():
        yield CONTENT[:100]
        release.wait(20)
        yield CONTENT[100:]

    def upload(statuses):
        with api.client(api.tokens["engineer"]) as client:
            statuses.append(client.put(f"/v1/blobs/{DIGEST}", content=slow()).status_code)

    statuses: list[int] = []
    threads = [threading.Thread(target=upload, args=(statuses,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        assert api.clients["engineer"].get("/v1/me", timeout=httpx.Timeout(5)).status_code == 200
    finally:
        release.set()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == [200] * 19 + [201]


def test_admitting_twice_is_once(service, actor):
    assert blobs.store(service, actor.project_id, DIGEST, [CONTENT], limit=LIMIT) == (len(CONTENT), True)
    assert blobs.store(service, actor.project_id, DIGEST, [CONTENT], limit=LIMIT) == (len(CONTENT), False)
    with service.database.transaction() as session:
        assert blobs.missing(session, actor.project_id, [DIGEST, sha256_digest(b"x")]) == [sha256_digest(b"x")]
        with pytest.raises(NotFound):
            blobs.size(session, actor.project_id, sha256_digest(b"x"))
