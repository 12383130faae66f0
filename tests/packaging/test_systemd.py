"""The unit file of a runner says what its engines rely on."""

import configparser
import shlex
from pathlib import Path

from workers.launchers.process import OOM_PREFERENCE

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "sluicegate-runner.service"


def read():
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_engines_outlive_a_runner_that_systemd_stops_and_it_is_started_again():
    service = read()["Service"]
    # control-group, the default, and mixed would end the engines of live traffic with their runner.
    assert service["KillMode"] == "process"
    assert service["Restart"] == "always"
    # Engines raise it for themselves, so that one of them is ended before the runner.
    assert int(service["OOMScoreAdjust"]) < OOM_PREFERENCE


def test_the_unit_starts_the_runner_on_the_queue_of_its_class_with_threads():
    words = shlex.split(read()["Service"]["ExecStart"])
    assert words[0].endswith("/celery")
    assert words[1:4] == ["--app", "workers.runner", "worker"]
    assert words[4:6] == ["--queues", "runner.${SLUICEGATE_RUNNER__RUNNER_CLASS}"]
    assert words[words.index("--pool") + 1] == "threads"
    # What workers tell each other would need queues that a broker's account need not be let into.
    assert set(words[-3:]) == {"--without-gossip", "--without-mingle", "--without-heartbeat"}
