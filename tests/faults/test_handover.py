"""Two runners on one stack, and engines that are real: what is live moves from the one that drains, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from registry.settings import RunnerSettings
from schemas.api import TokenCreate
from schemas.release import Replica
from tests.support.ground import Ground, until
from tests.support.runners import CLASS, end_all, is_running, started


@contextmanager
def second_runner(ground: Ground, folder: Path) -> Iterator[str]:
    """Run another runner for the stack. Yields its name; nothing of it is left in the end."""
    body = TokenCreate.model_validate({"name": "second", "role": "runner"})
    settings = RunnerSettings(
        name="second",
        runner_class=CLASS,
        api_url=ground.stack.facts["url"],
        token=SecretStr(ground.client.tokens.create(body).secret),
        broker_url=SecretStr("redis://127.0.0.1:1/0"),
        data_dir=folder / "second",
        store_dir=ground.home / "data" / "blobs",
    )
    try:
        with started(settings, folder / "runner.log"):
            yield settings.name
    finally:
        end_all(settings.data_dir)


def ready(ground: Ground) -> list[tuple[Replica, str]]:
    """Return the replicas that are ready, each with the name of the runner that holds it."""
    names = {job: one.name for one in ground.client.runners.list() for job in one.jobs}
    found = [one for one in ground.showing().replicas if one.state == "ready" and one.job in names]
    return [(one, names[one.job]) for one in found]


def waits_for(ground: Ground, name: str) -> list[str]:
    """Return what a runner that drains waits for."""
    shown = ground.client.runners.get(name).drain
    assert shown is not None
    return shown.waits_for


def until_on(ground: Ground, name: str) -> Replica:
    """Wait until one replica serves alone, on a runner."""

    def is_there() -> Replica | None:
        found = ready(ground)
        return found[0][0] if [held for _, held in found] == [name] else None

    replica: Replica = until(is_there, seconds=90, what=f"one replica, on {name}")
    return replica


def test_a_drained_runner_hands_what_is_live_to_another_and_back_without_a_lost_request(
    ground: Ground, tmp_path: Path
) -> None:
    (old, first) = ready(ground)[0]
    engine = ground.engines("replicas")[str(old.job)][0].pid
    with second_runner(ground, tmp_path) as second, ground.traffic() as statuses:
        until(lambda: second in {one.name for one in ground.client.runners.list()}, seconds=60, what="a second runner")
        ground.client.runners.drain(first, "a new driver")
        moved = until_on(ground, second)
        assert (moved.bundle, moved.address == old.address) == (old.bundle, False)
        until(lambda: not is_running(engine), seconds=30, what="the end of the old engine")
        until(lambda: waits_for(ground, first) == [], seconds=30, what="the end of the drain")
        # And back, so that nothing of the second is needed any more.
        ground.client.runners.undrain(first)
        ground.client.runners.drain(second, "it was a loan")
        until_on(ground, first)
        until(lambda: not ground.client.runners.get(second).jobs, seconds=30, what="the end of the loan")
        assert sum(statuses.values()) > 0
    assert set(statuses) == {200}, statuses
    ground.assert_sound()
