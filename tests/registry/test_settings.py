"""Settings that cannot be used are refused by name, and without what may be a secret."""

import pytest
from pydantic import ValidationError

from registry.settings import RunnerSettings, Settings, explain

GIVEN = {
    "DATABASE_URL": "postgresql+psycopg://gate:hush-1@db/sluicegate",
    "BROKER_URL": "amqp://gate:hush-2@broker:5672//",
    "STORAGE_DIR": "/nowhere",
    "SIGNING_KEY": "/nowhere.pem",
}


@pytest.fixture
def environment(monkeypatch):
    def give(**changes):
        for name, value in (GIVEN | changes).items():
            monkeypatch.setenv(f"SLUICEGATE_{name}", value)
            monkeypatch.setenv(f"SLUICEGATE_RUNNER__{name}", value)

    return give


@pytest.mark.parametrize(
    "address",
    [
        "redis://:hush-2@broker:6379/0",
        "rediss://:hush-2@broker/0",
        "amqp://gate:hush-2@broker/gates",
        "amqps://hush-2@broker",
    ],
)
def test_valkey_and_rabbitmq_are_brokers(environment, address):
    environment(BROKER_URL=address)
    assert Settings().broker_url.get_secret_value() == address
    assert "hush" not in repr(Settings())


@pytest.mark.parametrize(
    "address",
    [
        "ampq://gate:hush-2@broker//",
        "memory://hush-2",
        "hush-2",
        "redis",
        "rediss://:hush-2@broker/0?ssl_cert_reqs=none",
    ],
)
@pytest.mark.parametrize("kind", [Settings, RunnerSettings])
def test_another_broker_is_refused_before_anything_starts_and_no_secret_is_said(environment, kind, address):
    environment(BROKER_URL=address)
    with pytest.raises(ValidationError) as refused:
        kind()
    assert (
        "BROKER_URL: Value error, it must be redis://…, rediss://…, amqp://… or amqps://…, without a query"
        in explain(refused.value)
    )
    assert "hush" not in explain(refused.value)
    assert "hush" not in str(refused.value)


def test_a_setting_that_is_missing_is_named_without_the_others(environment, monkeypatch):
    environment()
    monkeypatch.delenv("SLUICEGATE_SIGNING_KEY")
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert "signing_key" in str(refused.value)
    assert "hush" not in str(refused.value)
