"""Which parts a stack has, and what they are told."""

import pytest

from workers.embedded import parts
from workers.embedded.__main__ import main
from workers.embedded.layout import Layout
from workers.embedded.part import Part
from workers.embedded.parts import Options, Stack
from workers.embedded.ports import Ports

OURS = "amqp://gate:hush@broker.example:5672/gates"


def table(folder, options):
    layout = Layout(folder / "data")
    layout.prepare()
    stack = Stack(layout, Ports(1, 2, 3), options)
    gateway = Part("envoy", ("/bin/true",), layout.run, {})
    return stack, {part.name: part for part in parts.table(stack, gateway)}


def test_a_broker_of_somebody_else_is_used_by_every_part_and_none_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICEGATE_BROKER_CA", "/ca.pem")
    stack, found = table(tmp_path, Options(broker=OURS))
    assert set(found) == {"postgres", "prepare", "envoy", "api", "control", "beat", "runner"}
    known = set(found)
    assert all(set(part.after) <= known for part in found.values())
    for name in ("api", "control", "beat"):
        assert found[name].environment["SLUICEGATE_BROKER_URL"] == OURS
    assert found["runner"].environment["SLUICEGATE_RUNNER__BROKER_URL"] == OURS
    assert {found[name].environment.get("SLUICEGATE_BROKER_CA") for name in ("api", "control", "beat")} == {"/ca.pem"}
    assert found["runner"].environment["SLUICEGATE_RUNNER__BROKER_CA"] == "/ca.pem"
    assert "hush" not in str([part.argv for part in found.values()])  # anybody can read an argument
    assert not any("hush" in str(found[name].environment) for name in ("postgres", "envoy"))
    assert not (stack.layout.secrets / parts.BROKER_PASSWORD).exists()


def test_without_one_a_stack_has_a_valkey_of_its_own_with_a_password(tmp_path):
    stack, found = table(tmp_path, Options())
    assert "valkey" in found
    assert "valkey" in found["control"].after
    password = (stack.layout.secrets / parts.BROKER_PASSWORD).read_text().strip()
    assert found["beat"].environment["SLUICEGATE_BROKER_URL"] == f"redis://:{password}@127.0.0.1:3/0"


@pytest.mark.parametrize("address", ["ampq://gate:hush@broker", "hush"])
def test_a_broker_of_another_kind_is_refused_before_anything_starts_and_its_address_is_not_said(
    tmp_path, monkeypatch, capsys, address
):
    monkeypatch.setenv("SLUICEGATE_BROKER_URL", address)
    assert main(["--data", str(tmp_path / "data")]) == 2
    said = "".join(capsys.readouterr())
    assert "SLUICEGATE_BROKER_URL is not usable: it must be redis://…" in said
    assert "hush" not in said


def test_an_empty_address_is_none(monkeypatch):
    monkeypatch.setenv("SLUICEGATE_BROKER_URL", "")
    assert parts.foreign_broker() is None
