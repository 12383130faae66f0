"""Which launcher a runner gets by its settings, and which bundles it then takes."""

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from registry.client import Client
from registry.settings import RunnerSettings
from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from tests.support.runners import until
from tests.support.scripted_kube import TOKEN, ScriptedKube
from workers import agent as agents
from workers.agent import Agent
from workers.boot import EngineMismatch, installed_engines, require_engine
from workers.engines.external import EXTERNAL
from workers.launchers.base import LaunchFailed
from workers.launchers.choice import launcher_of
from workers.launchers.process import ProcessLauncher

CLUSTER = {
    "launcher": "kubernetes",
    "kubernetes_claim": "bundles",
    "kubernetes_url": "http://127.0.0.1:1",
    "kubernetes_callers": "anybody",
}
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
    assert launcher_of(settings(**CLUSTER)).name == "kubernetes"
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
    for changes, resolvers in (
        ({}, ("169.254.20.10",)),
        ({"kubernetes_resolvers": "10.96.0.10,fd00::10"}, ("10.96.0.10", "fd00::10")),
        ({"kubernetes_resolvers": ""}, ()),
    ):
        assert launcher_of(settings(**CLUSTER, **changes)).pods.resolvers == resolvers
    with pytest.raises(ValidationError, match=r"10\.0\.0\.0/8"):
        settings(kubernetes_resolvers="10.0.0.0/8")


def test_who_may_call_pods_is_told_by_a_setting_that_names_pods_or_networks(settings):
    told = {**CLUSTER, "kubernetes_callers": "edge/app=envoy,10.0.0.0/24"}
    pods = launcher_of(settings(**told)).pods
    assert (pods.callers, pods.is_for_anybody) == (("edge/app=envoy", "10.0.0.0/24"), False)
    wrong = ("envoy", "app=envoy", "edge/app=", "10.0.0.1/24", "edge/app=envoy,", "edge/app=a b", "anybody,10.0.0.0/24")
    for one in wrong:
        with pytest.raises(ValidationError, match="kubernetes_callers"):
            settings(kubernetes_callers=one)


def test_no_engine_of_a_cluster_is_started_before_it_is_said_who_may_call_it(settings):
    unsaid = {**CLUSTER, "kubernetes_callers": None}
    with pytest.raises(LaunchFailed, match="set SLUICEGATE_RUNNER__KUBERNETES_CALLERS to the pods of runner and gate"):
        launcher_of(settings(**unsaid))
    pods = launcher_of(settings(**CLUSTER)).pods
    assert (pods.is_closed, pods.callers, pods.is_for_anybody) == (True, (), True)
    # Where no policy is made, nobody would be kept out by one.
    pods = launcher_of(settings(**unsaid, kubernetes_network="open")).pods
    assert (pods.is_closed, pods.is_for_anybody) == (False, False)


@pytest.mark.parametrize(
    ("callers", "is_shut_out"),
    [
        ("engines/app=runner,edge/app=envoy", False),
        ("edge/app=envoy,10.4.0.0/16", False),
        ("edge/app=envoy", True),
        ("edge/app=runner", True),
        ("engines/app=runner-0,10.5.0.0/16", True),
    ],
)
def test_a_runner_that_its_own_setting_would_shut_out_starts_nothing(settings, tmp_path, callers, is_shut_out):
    (tmp_path / "token").write_text(TOKEN)
    with ScriptedKube() as kube:
        metadata = {"name": "runner-0", "namespace": "engines", "labels": {"app": "runner"}}
        kube.add("pods", {"metadata": metadata}, phase="Running", podIP="10.4.2.1")
        asked = {"kubernetes_secrets": tmp_path, "kubernetes_namespace": "engines", "kubernetes_pod": "runner-0"}
        made = settings(**{**CLUSTER, **asked, "kubernetes_url": kube.url, "kubernetes_callers": callers})
        if is_shut_out:
            with pytest.raises(LaunchFailed, match="shuts out this runner itself, which is engines/runner-0 with a"):
                launcher_of(made)
        else:
            assert launcher_of(made).pods.owner["name"] == "runner-0"


def test_a_runner_that_may_start_nothing_says_why_and_looks_again_what_it_is_set_to(settings, monkeypatch):
    monkeypatch.setattr(agents, "FAILED_SECONDS", 0.02)
    made = settings(**{**CLUSTER, "kubernetes_callers": None})
    agent = Agent(made, Client(made.api_url, "t", timeout_seconds=1.0))
    with capture_logs() as said:
        agent.start()
        until(lambda: len(said) > 1, what="a second look")
        agent.stop()
    assert {(one["event"], one["log_level"]) for one in said} == {("launcher_cannot_be_used", "error")}
    assert "nobody is let in unasked" in said[0]["detail"]
