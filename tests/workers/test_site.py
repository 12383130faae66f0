"""Which accelerators each replica of a job gets, and for how long the files of what it boots are kept."""

from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import SecretStr

from registry.client import Client
from registry.settings import RunnerSettings
from schemas.bundle import Bundle
from schemas.runner import Claim, JobKind
from tests.support import chain, factories
from workers.agent import Agent
from workers.fingerprint import fingerprint
from workers.launchers.process import ProcessLauncher
from workers.lease import Lease
from workers.site import Site
from workers.staging import Staging

CARDS = tuple(f"GPU-{place}" for place in range(6))


def bundle(count: int) -> Bundle:
    row = {"accelerator": "nvidia-h100" if count else "cpu", "count": count}
    return Bundle.model_validate(factories.bundle_body(hardware=row))


def claim(own: Bundle, devices: list[int]) -> Claim:
    return Claim(
        job=uuid4(), kind=JobKind.EVALUATE, fencing_token=1, lease_seconds=30.0, release=None, target=None,
        bundle=own.digest, policy=None, suites=[], references={}, gates=[], attempt=1, replica=None, accepted=None,
        devices=devices, is_wanted=True, planned_bytes=2**31,
    )  # fmt: skip


def site(tmp_path: Path, client: Client, staging: Staging) -> Site:
    return Site("r1", tmp_path, fingerprint(), "gpu", staging, ProcessLauncher(), client, identifiers=CARDS)


def names(tmp_path: Path, devices: list[int], own: Bundle, accepted: Bundle | None = None) -> tuple[str, ...]:
    with Client("http://127.0.0.1:1", "none") as client:
        here, lease = site(tmp_path, client, Staging(tmp_path)), Lease(client, claim(own, devices))
        return here.devices(lease, own) if accepted is None else here.devices(lease, accepted, beside=own)


def test_what_a_job_s_own_bundle_takes_by_its_plan_is_ordered_for_no_other_one(tmp_path: Path) -> None:
    own, accepted = bundle(0), bundle(1)
    with Client("http://127.0.0.1:1", "none") as client:
        here, lease = site(tmp_path, client, Staging(tmp_path)), Lease(client, claim(own, [0]))
        assert here.order(lease, own, tmp_path).planned_bytes == 2**31
        assert here.order(lease, accepted, tmp_path, own).planned_bytes == 0
    told = {key: value for key, value in claim(own, []).model_dump().items() if key != "planned_bytes"}
    assert Claim.model_validate(told).planned_bytes is None  # by an older service


def test_the_files_of_what_a_job_boots_besides_its_own_bundle_are_kept_until_it_ends(tmp_path: Path) -> None:
    staging = Staging(tmp_path, kept_bytes=1)
    source = chain.write_bundle_directory(tmp_path / "source")
    accepted = chain.describe(source, environment="sha256:" + "a" * 64)
    contents = {file.sha256: (source / file.path).read_bytes() for file in accepted.files}
    staging.stage(accepted, lambda digest: iter([contents[digest]]))
    with Client("http://127.0.0.1:1", "none") as client:
        lease = Lease(client, claim(bundle(0), []))
        place = site(tmp_path, client, staging).stage(lease, accepted)
        assert place.was_there
        staging.release("another job, whose end makes room")
        assert place.root.is_dir()
        staging.release(str(lease.job))
        assert not place.root.exists()


def test_a_runner_whose_loop_began_anew_still_knows_what_its_jobs_hold(tmp_path: Path) -> None:
    settings = RunnerSettings(
        name="r1", runner_class="cpu", api_url="http://127.0.0.1:1", token=SecretStr("t"), data_dir=tmp_path,
        broker_url=SecretStr("redis://127.0.0.1:1/0"), kept_bytes=1,
    )  # fmt: skip
    source = chain.write_bundle_directory(tmp_path / "source")
    own = chain.describe(source, environment="sha256:" + "a" * 64)
    contents = {file.sha256: (source / file.path).read_bytes() for file in own.files}
    with Client("http://127.0.0.1:1", "none") as client:
        agent = Agent(settings, client)
        before = agent._site().staging
        before.hold(own.digest, "live")
        root = before.stage(own, lambda digest: iter([contents[digest]])).root
        agent._site().staging.release("another job, whose end makes room")
        assert root.is_dir()
        agent._site().staging.release("live")
        assert not root.exists()


def test_a_job_s_own_replica_has_the_first_and_the_accepted_bundle_the_next(tmp_path: Path) -> None:
    assert names(tmp_path, [4, 1, 5], bundle(2)) == ("GPU-4", "GPU-1")
    assert names(tmp_path, [4, 1, 5], bundle(2), bundle(1)) == ("GPU-5",)
    assert names(tmp_path, [3], bundle(0), bundle(1)) == ("GPU-3",)
    assert names(tmp_path, [3], bundle(1), bundle(0)) == ()


@pytest.mark.parametrize("devices", [[], [4]])
def test_a_replica_for_which_too_few_are_reserved_is_not_started_with_all_that_there_are(
    tmp_path: Path, devices: list[int]
) -> None:
    told = rf"{len(devices)} accelerators are reserved for job .*, whose replica takes 2"
    with pytest.raises(IndexError, match=told):
        names(tmp_path, devices, bundle(2))


def test_no_replica_gets_what_is_another_one_s_when_too_few_are_reserved(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match=r"2 accelerators are reserved for job .*, whose two replicas take 3"):
        names(tmp_path, [0, 1], bundle(2), bundle(1))
