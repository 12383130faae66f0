"""Which launcher a runner gets by its settings, and which bundles it then takes."""

import pytest
from pydantic import ValidationError

from registry.settings import RunnerSettings
from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from workers.boot import EngineMismatch, installed_engines, require_engine
from workers.engines.external import EXTERNAL
from workers.launchers.base import LaunchFailed
from workers.launchers.choice import launcher_of
from workers.launchers.process import ProcessLauncher

IMAGE = "registry.example/llamacpp@sha256:" + "a" * 64


@pytest.fixture
def settings(tmp_path):
    def made(**changes):
        given = {"name": "r1", "runner_class": "cpu", "api_url": "http://127.0.0.1:1", "token": "t"}
        return RunnerSettings(**given, broker_url="redis://127.0.0.1:1", data_dir=tmp_path, **changes)

    return made


def named(**engine):
    body = bundle_body()
    kept = {name: value for name, value in body["engine"].items() if name not in {"image", "environment"}}
    return Bundle.model_validate({**body, "engine": {**kept, **engine}})


def test_engines_are_processes_unless_a_setting_says_otherwise(settings):
    assert isinstance(launcher_of(settings()), ProcessLauncher)
    assert launcher_of(settings(launcher="container")).name == "container"
    cluster = settings(launcher="kubernetes", kubernetes_claim="bundles", kubernetes_url="http://127.0.0.1:1")
    assert launcher_of(cluster).name == "kubernetes"
    with pytest.raises(LaunchFailed, match="SLUICEGATE_RUNNER__KUBERNETES_CLAIM"):
        launcher_of(settings(launcher="kubernetes"))


@pytest.mark.parametrize("url", ["http://api.cluster.example", "http://10.0.0.1:6443", "http://localhost:8001"])
def test_a_service_account_s_token_is_never_sent_in_clear(settings, url):
    with pytest.raises(LaunchFailed, match="in clear: name https"):
        launcher_of(settings(launcher="kubernetes", kubernetes_claim="bundles", kubernetes_url=url))


def test_an_image_is_refused_where_engines_are_processes_and_an_environment_where_they_come_from_images(settings):
    containers = launcher_of(settings(launcher="container"))
    require_engine(named(image=IMAGE), containers)
    with pytest.raises(EngineMismatch, match="from images alone"):
        require_engine(named(environment="sha256:" + "b" * 64), containers)
    with pytest.raises(EngineMismatch, match=f"{IMAGE}.*starts processes alone"):
        require_engine(named(image=IMAGE), ProcessLauncher())


def test_a_runner_of_images_has_every_engine_that_an_image_can_bring(settings):
    engines = installed_engines(launcher_of(settings(launcher="container")))
    assert {"vllm", "sglang", "llamacpp"} <= set(engines)
    assert EXTERNAL.name not in engines
    assert set(engines.values()) == {None}


def test_pods_ask_for_names_where_a_node_s_cache_is_unless_a_setting_says_where(settings, tmp_path):
    told = {"launcher": "kubernetes", "kubernetes_claim": "bundles", "kubernetes_url": "http://127.0.0.1:1"}
    for changes, resolvers in (
        ({}, ("169.254.20.10",)),
        ({"kubernetes_resolvers": "10.96.0.10,fd00::10"}, ("10.96.0.10", "fd00::10")),
        ({"kubernetes_resolvers": ""}, ()),
    ):
        assert launcher_of(settings(**told, **changes)).pods.resolvers == resolvers
    with pytest.raises(ValidationError, match=r"10\.0\.0\.0/8"):
        settings(kubernetes_resolvers="10.0.0.0/8")


def test_who_may_call_pods_is_told_by_a_setting_that_names_pods_or_networks(settings):
    told = {"launcher": "kubernetes", "kubernetes_claim": "bundles", "kubernetes_url": "http://127.0.0.1:1"}
    assert launcher_of(settings(**told)).pods.callers == ()
    callers = "edge/app=envoy,10.0.0.0/24"
    assert launcher_of(settings(**told, kubernetes_callers=callers)).pods.callers == ("edge/app=envoy", "10.0.0.0/24")
    for wrong in ("envoy", "app=envoy", "edge/app=", "10.0.0.1/24", "edge/app=envoy,", "edge/app=a b"):
        with pytest.raises(ValidationError, match="kubernetes_callers"):
            settings(kubernetes_callers=wrong)
