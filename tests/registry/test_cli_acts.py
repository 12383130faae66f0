"""What people do to a release on the command line, and what they are told when it does not take it."""


def test_taking_back_where_nothing_can_be_taken_back_says_so_and_changes_nothing(scene):  # C142
    scene.target()
    identity = scene.release()["id"]

    def seen() -> tuple[object, object]:
        return tuple(
            scene.command.ok(*what, "--json").json for what in (("release", "show", identity), ("target", "list"))
        )

    before = seen()
    for _ in range(2):
        ran = scene.command("release", "rollback", identity, "-r", "stop")
        assert (ran.status, ran.out) == (4, "")
        assert f"there is nothing to take back; `sluicegate release reject {identity} --reason …` ends it" in ran.err
        assert seen() == before
    scene.command.ok("release", "reject", identity, "-r", "no")
    before = seen()
    ran = scene.command("release", "rollback", identity, "-r", "stop", "--json")
    assert (ran.status, ran.json["type"].rsplit("/", 1)[1], ran.json["phase"]) == (4, "transition-refused", "rejected")
    assert "it never had traffic" in ran.json["detail"]
    assert scene.command.ok("release", "reject", identity, "-r", "no", "--json").json["phase"] == "rejected"
    assert seen() == before


def test_who_takes_the_first_release_back_is_told_that_nothing_will_serve(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    ran = scene.command.ok("release", "rollback", identity, "-r", "stop")
    assert "no earlier release to go back to: chat@prod will answer 503" in ran.err
