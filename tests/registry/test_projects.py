import stat

import pytest
from sqlalchemy import func, select

from registry import auth, bootstrap, db, evidence, projects
from registry.tables import EntryRow, ProjectRow, TokenRow
from schemas.problems import Conflict, NotFound, NotPermitted
from tests.support.api import ROLES, make_tokens
from tests.support.together import together


def count(service, table):
    with service.database.transaction() as session:
        return session.scalar(select(func.count()).select_from(table))


def test_bootstrapping_makes_a_project_and_its_tokens_once(service):
    secrets = {"admin": auth.new_secret(), "runner": auth.new_secret()}
    for _ in range(2):
        projects.bootstrap(service, "default", secrets)
    with service.database.transaction() as session:
        for role, secret in secrets.items():
            assert auth.authenticate(session, secret, db.now(session)).role == role
    assert (count(service, ProjectRow), count(service, TokenRow), count(service, EntryRow)) == (1, 2, 3)


@pytest.mark.parametrize("change", ["role", "project", "revoked"])
def test_bootstrapping_does_not_take_a_secret_that_means_something_else(service, change):
    secret = auth.new_secret()
    projects.bootstrap(service, "default", {"admin": secret})
    if change == "revoked":
        with service.database.transaction() as session:
            auth.find_token(session, secret).revoked_at = db.now(session)
    project = "other" if change == "project" else "default"
    with pytest.raises(Conflict):
        projects.bootstrap(service, project, {"runner" if change == "role" else "admin": secret})
    assert (count(service, ProjectRow), count(service, TokenRow)) == (1, 1)


def test_a_secret_is_made_once_in_a_file_of_its_owners_only(tmp_path):
    path = tmp_path / "admin.token"
    secret = projects.secret_from(path)
    assert projects.secret_from(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "secret", "slg_short", "slg_" + "a" * 44])
def test_a_file_with_something_else_in_it_is_refused(tmp_path, content):
    path = tmp_path / "admin.token"
    path.write_text(content)
    with pytest.raises(ValueError, match="does not hold a token"):
        projects.secret_from(path)


def test_the_command_bootstraps_from_the_environment(service, tmp_path, monkeypatch, capsys):
    url = service.settings.database_url.get_secret_value()
    for name, value in {
        "DATABASE_URL": url,
        "BROKER_URL": "redis://127.0.0.1:1/0",
        "STORAGE_DIR": str(tmp_path / "blobs"),
        "SIGNING_KEY": str(tmp_path / "signing.pem"),
    }.items():
        monkeypatch.setenv(f"SLUICEGATE_{name}", value)
    admin, runner = tmp_path / "admin.token", tmp_path / "runner.token"
    arguments = ["--admin-token-file", str(admin), "--runner-token-file", str(runner)]
    assert bootstrap.main(arguments) == 0
    assert bootstrap.main(arguments) == 0
    with service.database.transaction() as session:
        who = auth.authenticate(session, admin.read_text().strip(), db.now(session))
    assert (who.project, who.role) == ("default", "admin")
    runner.write_text(admin.read_text())
    assert bootstrap.main(arguments) == 2
    assert (
        capsys.readouterr().err
        == "bootstrap: the secret given for the role runner is that of another or a former token\n"
    )


def test_projects_and_tokens_are_made_over_http(api):
    admin = api.clients["admin"]
    made = admin.post("/v1/projects", json={"name": "team-b"})
    assert made.status_code == 201
    taken = admin.post("/v1/projects", json={"name": "team-b"})
    assert (taken.status_code, taken.json()["holder"]) == (409, made.json()["id"])
    assert [one["name"] for one in admin.get("/v1/projects").json()["items"]] == ["team-b", "default"]
    token = admin.post("/v1/tokens", json={"name": "bo", "role": "admin", "project": "team-b"}).json()
    with api.client(token["secret"]) as theirs:
        assert theirs.get("/v1/me").json() == {
            "project": "team-b",
            "name": "bo",
            "role": "admin",
            "targets": None,
            "expires_at": None,
        }
        # Who administers one project neither sees another, nor makes one, nor makes tokens for it.
        assert [one["name"] for one in theirs.get("/v1/projects").json()["items"]] == ["team-b"]
        assert theirs.post("/v1/projects", json={"name": "team-c"}).status_code == 403
        for name in ("default", "nowhere"):
            refused = theirs.post("/v1/tokens", json={"name": "bo", "role": "admin", "project": name})
            assert refused.status_code == 404
        assert theirs.post("/v1/tokens", json={"name": "eve", "role": "engineer"}).status_code == 201
        stream = theirs.get("/v1/evidence").json()["items"]
    assert {entry["actor"] for entry in stream} == {"admin", "bo"}
    assert {entry["stream"] for entry in stream} == {f"project/{made.json()['id']}"}


def test_limits_are_set_only_as_they_were_seen_and_of_two_at_once_one_is(api):
    root = api.clients["admin"]
    seen = root.get("/v1/projects/default")
    assert seen.headers["etag"] == f'"{seen.json()["generation"]}"'

    def limit(jobs, etag):
        return root.post("/v1/projects/default/limits", json={"jobs": jobs}, headers={"if-match": etag})

    for round_ in range(4):
        done = together(
            lambda n=round_, etag=seen.headers["etag"]: limit(2 * n + 1, etag),
            lambda n=round_, etag=seen.headers["etag"]: limit(2 * n + 2, etag),
        )
        assert sorted(one.status_code for one in done) == [200, 412]
        won, lost = sorted(done, key=lambda one: one.status_code)
        said = lost.json()
        assert (said["version"], said["change"]) == (str(won.json()["generation"]), "project_set")
        assert said["changed_by"] == "admin"
        seen = root.get("/v1/projects/default")
        assert (seen.json()["own_limits"], seen.headers["etag"]) == (won.json()["own_limits"], won.headers["etag"])
    # What says nothing new is no change, and who names no generation has seen none.
    assert root.post("/v1/projects/default/limits", json={"jobs": 3}).json()["own_limits"]["jobs"] == 3


def test_projects_are_listed_in_pages(api):
    admin = api.clients["admin"]
    for number in range(5):
        admin.post("/v1/projects", json={"name": f"p{number}"})
    seen, cursor = [], None
    while True:
        page = admin.get("/v1/projects", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        seen.append([one["name"] for one in page["items"]])
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [["p4", "p3"], ["p2", "p1"], ["p0", "default"]]


def test_a_project_that_is_not_there_is_not_found(session):
    with pytest.raises(NotFound):
        projects.named(session, "nowhere")


def test_only_administrators_of_the_installation_make_projects(service):
    make_tokens(service, "team-b")
    with service.database.transaction() as session:
        project = projects.named(session, "team-b")
        theirs = auth.Actor(project.id, "team-b", "bo", "admin")
        with pytest.raises(NotPermitted):
            projects.require_installation(theirs)
        stream = f"project/{project.id}"
        assert len(evidence.browse_stream(session, project.id, stream, after=0, limit=10)) == 1 + len(ROLES)
