"""The gateway's desired document survives every point at which its writer can die."""

import multiprocessing
import time

import pytest

from gates.router import Arm, Split
from workers.traffic.desired import Desired, Rollback, locked, write_atomically
from workers.traffic.problems import GatewayBusy

STABLE = Arm("stable", "chat@prod/aaaaaaaaaaaa/r1", "127.0.0.1:8001", 5_000)
CANDIDATE = Arm("candidate", "chat@prod/bbbbbbbbbbbb/r2", "127.0.0.1:8002", 5_000)
ALONE = Arm("stable", "chat@prod/aaaaaaaaaaaa/r1", "127.0.0.1:8001", 10_000)
OTHER = Split("other@prod", 3, (Arm("stable", "other@prod/cccccccccccc/r9", "127.0.0.1:8009", 10_000),))


@pytest.fixture
def desired():
    """A canary on chat@prod with a way back, and another target that rests."""
    return Desired(
        revision=9,
        version="r8",
        was="r7",
        splits={"chat@prod": Split("chat@prod", 4, (STABLE, CANDIDATE)), "other@prod": OTHER},
        rollbacks={"chat@prod": Rollback((ALONE,), 60.0)},
    )


def test_it_reads_back_what_it_writes(desired):
    assert Desired.from_json(desired.to_json()) == desired


@pytest.mark.parametrize("which", ["chat@prod", "all"])
def test_a_restore_behind_its_back_is_folded_in(desired, which):
    folded = desired.folded(f"r9.rollback.{which}")
    assert folded.splits["chat@prod"] == Split("chat@prod", 5, (ALONE,))
    assert folded.splits["other@prod"] == OTHER
    assert folded.rollbacks == {}
    assert folded.restored == {"chat@prod"}
    assert folded.version == f"r9.rollback.{which}"
    assert folded.folded(folded.version) is folded


def test_a_document_prepared_just_before_a_write_was_cut_short_is_folded_in_too(desired):
    assert desired.folded("r6.rollback.chat@prod").restored == {"chat@prod"}


@pytest.mark.parametrize("live", ["r8", "r7", "r3", "", "r9.rollback.ghost@prod"])
def test_what_is_no_restore_of_a_prepared_target_changes_nothing(desired, live):
    assert desired.folded(live) is desired


def test_a_write_cut_short_after_an_earlier_restore_is_no_second_restore(desired):
    """The target was restored once, a new canary was prepared, and its first shift died before the rename."""
    again = Desired(
        revision=12,
        version="r12",
        was="r9.rollback.chat@prod",
        splits=desired.splits,
        rollbacks=desired.rollbacks,
        restored=frozenset(),
    )
    assert again.folded("r9.rollback.chat@prod") is again


def test_a_new_split_ends_being_restored(desired):
    folded = desired.folded("r9.rollback.all")
    assert folded.shifted(Split("other@prod", 4, OTHER.arms)).restored == {"chat@prod"}
    assert folded.shifted(Split("chat@prod", 6, (ALONE,))).restored == frozenset()


def test_revisions_of_gateway_and_target_grow(desired):
    assert desired.changed().revision == 10
    assert desired.changed().version == "r10"
    assert (desired.next_revision("chat@prod"), desired.next_revision("new@prod")) == (5, 1)


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "rds.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def _hold(path, ready):
    with locked(path):
        ready.set()
        time.sleep(60)


def test_a_lock_is_seen_by_other_processes_and_ends_with_its_holder(tmp_path):
    path = tmp_path / "gateway.lock"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(path, ready))
    holder.start()
    try:
        assert ready.wait(30)
        with pytest.raises(GatewayBusy), locked(path, timeout_seconds=0.05):
            pass
        holder.kill()
        with locked(path, timeout_seconds=10):
            pass
    finally:
        holder.kill()
        holder.join()
