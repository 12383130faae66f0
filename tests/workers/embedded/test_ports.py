import json
import socket

import pytest

from workers.embedded.layout import DataRefused
from workers.embedded.ports import FIRST, LAST, Ports, choose, is_free


@pytest.fixture
def taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_ports_are_free_distinct_and_remembered(tmp_path):
    first = choose(tmp_path / "ports.json")
    numbers = {first.api, first.gateway, first.broker}
    assert len(numbers) == 3
    assert all(FIRST <= number < LAST and is_free(number) for number in numbers)
    assert choose(tmp_path / "ports.json") == first


def test_a_port_that_is_given_is_used_and_remembered(tmp_path):
    first = choose(tmp_path / "ports.json")
    known = {first.api, first.gateway, first.broker}
    port = next(port for port in range(FIRST, LAST) if port not in known and is_free(port))
    assert choose(tmp_path / "ports.json", api=port) == Ports(port, first.gateway, first.broker)
    assert choose(tmp_path / "ports.json").api == port


@pytest.mark.parametrize(("name", "option"), [("api", "--port"), ("gateway", "--gateway-port")])
def test_a_known_port_that_is_taken_is_no_reason_to_move_silently(tmp_path, taken, name, option):
    choose(tmp_path / "ports.json")
    known = json.loads((tmp_path / "ports.json").read_text())
    (tmp_path / "ports.json").write_text(json.dumps({**known, name: taken}))
    with pytest.raises(DataRefused, match=f"port {taken} of the {name} is in use.*{option}$") as caught:
        choose(tmp_path / "ports.json")
    assert caught.value.status == 4


@pytest.mark.parametrize("name", ["api", "gateway"])
def test_a_port_that_is_given_and_taken_is_refused(tmp_path, taken, name):
    with pytest.raises(DataRefused, match=f"port {taken} of the {name} is in use"):
        choose(tmp_path / "ports.json", **{name: taken})


def test_the_broker_moves_when_its_port_is_taken(tmp_path, taken):
    (tmp_path / "ports.json").write_text(json.dumps({"broker": taken}))
    assert choose(tmp_path / "ports.json").broker != taken


def test_two_parts_cannot_share_a_port(tmp_path):
    port = choose(tmp_path / "ports.json").api
    with pytest.raises(DataRefused, match="cannot share") as caught:
        choose(tmp_path / "other.json", api=port, gateway=port)
    assert caught.value.status == 2


@pytest.mark.parametrize("text", ["", "[]", '{"api": "8080", "gateway": 99999, "broker": true}'])
def test_a_damaged_memory_of_ports_is_forgotten(tmp_path, text):
    (tmp_path / "ports.json").write_text(text)
    assert all(FIRST <= port < LAST for port in vars(choose(tmp_path / "ports.json")).values())
