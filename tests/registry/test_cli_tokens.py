"""Tokens over HTTP and by command."""

from registry import auth


def test_tokens_are_listed_without_secrets_and_revoked_over_http(api):
    admin, auditor = api.clients["admin"], api.clients["auditor"]
    new = admin.post("/v1/tokens", json={"name": "bo", "role": "ci", "targets": ["chat@prod"]}).json()
    listed = auditor.get("/v1/tokens")
    assert new["secret"] not in listed.text
    first = listed.json()["items"][0]
    assert (first["name"], first["role"], first["targets"], first["is_valid"]) == ("bo", "ci", ["chat@prod"], True)
    url = f"/v1/tokens/{new['id']}/revocations"
    assert auditor.post(url, json={"reason": "no"}).status_code == 403
    assert admin.post(url, json={"reason": "rotated"}).json()["is_valid"] is False
    with api.client(new["secret"]) as bo:
        assert bo.get("/v1/me").status_code == 401
    for role in ("viewer", "ci", "engineer", "manager", "runner"):
        assert api.clients[role].get("/v1/tokens").status_code == 403


def test_a_token_says_which_one_made_it_and_its_end_names_those_that_it_made(command, stack):
    command.be("admin", stack)
    everyone = command.ok("token", "list", "--json").json["items"]
    # The operator made these.
    assert {one["made_by"] for one in everyone} == {None}
    root = next(one["id"] for one in everyone if one["name"] == "admin")
    second = command.ok("token", "create", "lee", "--role", "admin", "--json").json
    command.ok("project", "create", "team-b")
    command.use(stack.url, second["secret"])
    heir = command.ok("token", "create", "bo", "--role", "ci", "--json").json["id"]
    elsewhere = command.ok("token", "create", "bo", "--role", "ci", "--project", "team-b", "--json").json["id"]
    gone = command.ok("token", "create", "gone", "--role", "ci", "--json").json["id"]
    command.ok("token", "revoke", gone, "--reason", "not needed")
    makers = {one["id"]: one["made_by"] for one in command.ok("token", "list", "--json").json["items"]}
    assert (makers[second["id"]], makers[heir], makers[gone]) == (root, second["id"], second["id"])
    # A token may end itself.
    ran = command.ok("token", "revoke", second["id"], "--reason", "was in a log")
    for one in (heir, elsewhere):
        assert f"it made {one} of bo, ci" in ran.err
        assert f"`sluicegate token revoke {one}`" in ran.err
    assert gone not in ran.err
    command.be("admin", stack)
    again = command.ok("token", "revoke", second["id"], "--reason", "again", "--json").json
    assert [one["id"] for one in again["made"]] == [heir, elsewhere]
    log = command.ok("evidence", "list", "--kind", "token_created", "--json").json["items"]
    assert [one["body"].get("made_by") for one in log if one["body"]["token"] in (root, heir)] == [None, second["id"]]
    assert command.ok("evidence", "verify", "--json").json["faults"] == []


def test_login_says_when_the_token_ends(command, stack):
    command.be("admin", stack)
    told = command.ok("token", "create", "bo", "--role", "ci", "--days", "1", "--json").json
    ran = command.ok("login", stack.url, "--token", told["secret"], "--json").json
    assert ran["expires_at"] == told["expires_at"] is not None
    command.use(stack.url, told["secret"])
    assert command.ok("login").out.rstrip().endswith(f", until {told['expires_at'][:19].replace('T', ' ')}Z")
    command.be("admin", stack)
    assert (command.ok("login", "--json").json["expires_at"], "until" in command.ok("login").out) == (None, False)
    command.ok("token", "revoke", told["id"], "--reason", "done")


def test_tokens_are_made_listed_and_revoked_by_command(command, stack):
    command.be("admin", stack)
    ran = command.ok("token", "create", "bo", "--role", "ci", "--target", "chat@prod", "--days", "1", "--json")
    told = ran.json
    assert auth.is_secret(told["secret"])
    assert "there is no target chat@prod yet" in ran.err
    listed = command.ok("token", "list", "--valid").out
    assert "chat@prod" in listed
    url = stack.url
    command.use(url, told["secret"])
    ends = told["expires_at"][:19].replace("T", " ")
    said = f"bo, ci of project default at {url}, until {ends}Z, for chat@prod alone"
    assert command.ok("login").out.strip() == said
    assert command.ok("login", "--json").json["targets"] == ["chat@prod"]
    command.be("admin", stack)
    assert f"valid until {told['expires_at'][:19].replace('T', ' ')}Z" in listed
    assert told["secret"] not in listed
    assert command("token", "create", "bo", "--role", "king").status == 2
    assert command("token", "create", "bo", "--role", "ci").status == 4
    command.ok("token", "revoke", "bo", "--reason", "rotated")
    assert "revoked" in command.ok("token", "list").out
    assert command("token", "revoke", "bo", "--reason", "again").status == 2
    again = command.ok("token", "create", "bo", "--role", "viewer")
    assert auth.is_secret(again.out.strip())
    command.use(stack.url, again.out.strip())
    assert command("token", "list").status == 4


def test_who_looks_for_runners_where_there_are_none_is_told_that_a_project_has_its_own(command, stack):
    command.be("admin", stack)
    project = command.ok("login", "--json").json["project"]
    ran = command.ok("runner", "list", "--json")
    assert ran.json == {"items": []}
    assert f"no runner of project {project}: runners belong to a project" in ran.err
    assert f"`sluicegate token create NAME --role runner --project {project}`" in ran.err
