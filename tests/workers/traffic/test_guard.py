"""When the controller is gone, traffic goes back by itself, once, and somebody is told."""

import json
import os
import threading
from datetime import UTC, datetime

import pytest

from tests.support.gateway import TARGET, arm, ask_many, split, wait_until
from tests.support.streams import Script
from workers.traffic.desired import locked
from workers.traffic.guard import DeadManSwitch
from workers.traffic.problems import GatewayHeld

NOW = datetime(2026, 11, 3, 14, 3, tzinfo=UTC)


@pytest.fixture
def canary(running, engines):
    """A gateway in the middle of a canary that has gone to the candidate whole."""
    stable, candidate = engines("stable"), engines("candidate")
    back = (arm("stable", stable.address, 10_000), arm("candidate", candidate.address, 0, bundle="b"))
    running.gateway.prepare_rollback(TARGET, back, silence_seconds=30)
    only = (arm("stable", stable.address, 0), arm("candidate", candidate.address, 10_000, bundle="b"))
    running.gateway.apply(split(1, *only))
    running.gateway.beat(TARGET)
    return running


def beat(gateway, at, target=TARGET):
    """A heartbeat with a stamp of its own, however coarse the file system's clock is."""
    gateway.beat(target)
    os.utime(gateway.heartbeat(target), (at, at))


def test_a_controller_that_beats_keeps_its_split(canary):
    switch = DeadManSwitch(canary.gateway, monotonic=0)
    for second in range(0, 200, 20):
        beat(canary.gateway, 1_000 + second)
        assert switch.check(monotonic=second, now=NOW) is None
    assert ask_many(canary.url(), 20).engines == {"candidate": 20}


def test_a_controller_that_looks_at_one_target_only_loses_the_traffic_of_all(canary, engines):
    first, second = engines("first"), engines("second")
    before = (arm("stable", first.address, 10_000, target="other@prod"),)
    canary.gateway.prepare_rollback("other@prod", before, silence_seconds=30)
    canary.gateway.apply(split(1, arm("stable", second.address, 10_000, target="other@prod"), target="other@prod"))
    switch = DeadManSwitch(canary.gateway, monotonic=0)
    for second_of in (0, 10, 20, 29):
        beat(canary.gateway, 1_000 + second_of, "other@prod")
        assert switch.check(monotonic=second_of, now=NOW) is None
    beat(canary.gateway, 1_030, "other@prod")
    notice = switch.check(monotonic=30, now=NOW)
    assert (notice["silent_seconds"], notice["targets"]) == (30.0, [TARGET, "other@prod"])
    assert ask_many(canary.url(), 10).engines == {"stable": 10}


def test_a_way_back_that_is_prepared_anew_is_waited_for_anew(canary):
    gateway, switch = canary.gateway, DeadManSwitch(canary.gateway, monotonic=0)
    back = gateway._read().rollbacks[TARGET].arms
    gateway.discard_rollback(TARGET)
    assert switch.check(monotonic=25, now=NOW) is None
    gateway.prepare_rollback(TARGET, back, silence_seconds=30)
    assert switch.check(monotonic=40, now=NOW) is None
    assert switch.check(monotonic=69, now=NOW) is None
    assert switch.check(monotonic=70, now=NOW) is not None


def test_a_silent_controller_loses_it_and_a_notice_says_so(canary):
    switch = DeadManSwitch(canary.gateway, monotonic=0)
    assert switch.check(monotonic=29.9, now=NOW) is None
    notice = switch.check(monotonic=30.0, now=NOW)
    assert ask_many(canary.url(), 20).engines == {"stable": 20}
    assert notice == canary.gateway.take_notice()
    assert (notice["reason"], notice["at"]) == ("controller_lost", "2026-11-03T14:03:00.000000Z")
    assert (notice["silent_seconds"], notice["targets"]) == (30.0, [TARGET])
    assert 0 <= notice["acknowledged_seconds"] < 1
    assert switch.check(monotonic=31.0, now=NOW) is None


def test_a_clock_that_jumps_does_not_fire_it(canary):
    beat(canary.gateway, 0)  # 1970
    switch = DeadManSwitch(canary.gateway, monotonic=500)
    assert switch.check(monotonic=529, now=NOW) is None
    assert switch.check(monotonic=530, now=NOW) is not None


def test_a_controller_that_never_beat_is_silent_too(canary):
    canary.gateway.heartbeat(TARGET).unlink()
    switch = DeadManSwitch(canary.gateway, monotonic=0)
    assert switch.check(monotonic=31, now=NOW) is not None


def test_without_a_prepared_rollback_silence_means_nothing(canary):
    canary.gateway.discard_rollback(TARGET)
    switch = DeadManSwitch(canary.gateway, monotonic=0)
    assert switch.check(monotonic=1e6, now=NOW) is None
    assert canary.gateway.take_notice() is None
    assert ask_many(canary.url(), 20).engines == {"candidate": 20}


def test_every_canary_of_the_gateway_goes_back_at_once(canary, engines):
    first, second = engines("first"), engines("second")
    before = (arm("stable", first.address, 10_000, target="other@prod"),)
    after = (arm("stable", second.address, 10_000, target="other@prod"),)
    canary.gateway.prepare_rollback("other@prod", before, silence_seconds=600)
    canary.gateway.apply(split(1, *after, target="other@prod"))
    notice = DeadManSwitch(canary.gateway, monotonic=0).check(monotonic=30, now=NOW)
    assert notice["targets"] == [TARGET, "other@prod"]
    assert ask_many(canary.url(), 10).engines == {"stable": 10}
    assert ask_many(canary.url("other@prod"), 10).engines == {"first": 10}


def test_nothing_moves_until_the_notice_was_recorded(canary):
    gateway = canary.gateway
    DeadManSwitch(gateway, monotonic=0).check(monotonic=30, now=NOW)
    restored = gateway.desired(TARGET)
    assert (restored.revision, restored.weight_bp("candidate")) == (2, 0)
    again = split(3, *restored.arms)
    with pytest.raises(GatewayHeld):
        gateway.apply(again)
    with pytest.raises(GatewayHeld):
        gateway.prepare_rollback(TARGET, restored.arms)
    assert gateway.restore(TARGET).split == restored
    assert gateway.take_notice()["reason"] == "controller_lost"
    gateway.clear_notice()
    gateway.clear_notice()
    assert gateway.take_notice() is None
    gateway.apply(again)


def test_a_switch_that_died_between_notice_and_rename_goes_on(canary):
    canary.gateway.notice.write_text(json.dumps({"reason": "controller_lost", "targets": [TARGET]}))
    notice = DeadManSwitch(canary.gateway, monotonic=0).check(monotonic=0, now=NOW)
    assert notice["acknowledged_seconds"] is not None
    assert ask_many(canary.url(), 20).engines == {"stable": 20}


def test_a_controller_that_hangs_with_the_lock_does_not_stop_it(canary):
    with locked(canary.gateway.lock):
        notice = DeadManSwitch(canary.gateway, monotonic=0).check(monotonic=30, now=NOW)
    assert notice["acknowledged_seconds"] is not None
    assert ask_many(canary.url(), 20).engines == {"stable": 20}
    assert canary.gateway.desired(TARGET).revision == 2


def test_a_controller_that_wakes_inside_a_change_does_not_undo_it(canary, engines):
    gateway = canary.gateway
    late = engines("late", Script(is_healthy=False))
    failures = []

    def shift():
        try:
            gateway.apply(split(2, arm("stable", late.address, 10_000, bundle="c")))
        except GatewayHeld as held:
            failures.append(held)

    controller = threading.Thread(target=shift)
    controller.start()
    late_cluster = arm("stable", late.address, 0, bundle="c").cluster
    wait_until(lambda: late_cluster in gateway.admin.clusters())  # it waits for the arm's health, with the lock
    DeadManSwitch(gateway, monotonic=0).check(monotonic=30, now=NOW)
    late.script = Script()
    controller.join(15)
    assert len(failures) == 1
    assert ask_many(canary.url(), 20).engines == {"stable": 20}
    assert gateway.desired(TARGET).weight_bp("stable") == 10_000


def test_with_envoy_down_the_rollback_is_what_it_starts_with(canary):
    canary.kill()
    notice = DeadManSwitch(canary.gateway, monotonic=0).check(monotonic=30, now=NOW)
    assert notice["acknowledged_seconds"] is None
    canary.restart()
    assert ask_many(canary.url(), 20).engines == {"stable": 20}
