"""Settings of every process, read once from the environment (`SLUICEGATE_…`, nested by `__`) and passed down."""

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gates.sources.hosts import external_hosts
from schemas.common import S3_PATTERN
from schemas.runner import LauncherName

MOST_PROCESSES = 64
BROKER_SCHEMES = ("redis://", "rediss://", "amqp://", "amqps://")
BROKER_TOLD = "it must be redis://…, rediss://…, amqp://… or amqps://…, without a query"


def _broker(told: SecretStr) -> SecretStr:
    if not is_broker(told.get_secret_value()):
        raise ValueError(BROKER_TOLD)
    return told


def is_broker(url: str) -> bool:
    """Tell whether an address is a broker's. A query could say that a certificate is not checked."""
    return url.startswith(BROKER_SCHEMES) and "?" not in url


def _addresses(told: str) -> str:
    for one in told.split(",") if told else []:
        ip_address(one)
    return told


_PODS = re.compile(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?=[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
)


ANYBODY = "anybody"
"""In the place of callers: whatever can reach the cluster's pods."""


def _callers(told: str) -> str:
    for one in () if told == ANYBODY else told.split(","):
        if "=" not in one:
            ip_network(one)
        elif not _PODS.fullmatch(one):
            raise ValueError(f"{one} is neither NAMESPACE/LABEL=VALUE nor a network, as 10.0.0.0/24, nor {ANYBODY}")
    return told


BrokerUrl = Annotated[SecretStr, AfterValidator(_broker)]


class Gateway(BaseModel):
    """One gateway that this service drives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path = Field(description="Folder of the gateway's files; local to the control worker.")
    url: str = Field(description="Base URL that callers reach the gateway under.")


class Settings(BaseSettings):
    """Settings of the API and of the control workers."""

    model_config = SettingsConfigDict(
        env_prefix="SLUICEGATE_",
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        hide_input_in_errors=True,  # a process that cannot start says why in its log, where no password may be
    )

    environment: Literal["development", "production"] = Field("production", description="Kind of installation.")
    database_url: SecretStr = Field(description="PostgreSQL ≥ 15, as postgresql+psycopg://…")
    broker_url: BrokerUrl = Field(
        description="Broker that wakes the workers: redis://… (Valkey, Redis) or amqp://… (RabbitMQ); rediss://… and "
        "amqps://… with TLS."
    )
    broker_ca: Path | None = Field(
        None, description="PEM file of the authorities that vouch for the broker's certificate; none for the system's."
    )
    storage_dir: Path = Field(
        description="Folder of the content-addressed blobs; with a bucket, of what is arriving for it."
    )
    storage: str | None = Field(
        None, description="Bucket that keeps the blobs, as s3://bucket/prefix; none for the folder.", pattern=S3_PATTERN
    )
    storage_endpoint: str | None = Field(
        None, description="URL of the S3 server; none for AWS.", pattern=r"^https?://[^@\s]+$"
    )
    storage_region: str | None = Field(None, description="The bucket's region; none for what AWS_DEFAULT_REGION says.")
    signing_key: Path = Field(description="PEM file of the ECDSA P-256 key that signs evidence; made when absent.")
    public_url: str = Field("http://127.0.0.1:8080", description="Address that callers reach the API under.")
    gateways: dict[str, Gateway] = Field(default_factory=dict, description="Gateways by name.")
    max_blob_bytes: int = Field(2**40, description="Largest blob, in bytes.", ge=1)
    body_silence_seconds: float = Field(
        20.0,
        description="Longest wait for the next bytes of a body, in seconds, when none came faster before, and for a "
        "request's first line and headers.",
        gt=0,
    )
    body_bytes_per_second: int = Field(1024, description="Slowest rate, in bytes, at which a body may come.", ge=1)
    body_places: int = Field(
        256, description="Blobs received at once by the API; no token has more places than are free.", ge=2
    )
    upload_seconds: float = Field(
        86400.0, description="How long an upload in pieces may be silent before what is there of it is removed.", gt=0
    )
    project_bytes: int = Field(
        0, description="Most bytes of blobs that a project holds, unless its own limit says otherwise; 0 for any.", ge=0
    )
    project_uploads: int = Field(
        256, description="Most uploads in pieces that a project has under way at once; 0 for any.", ge=0
    )
    project_documents: int = Field(1_000_000, description="Most documents that a project holds; 0 for any.", ge=0)
    blob_grace_seconds: float = Field(
        86400.0, description="How long a blob is kept that no bundle is made of: time to register one.", gt=0
    )
    record_days: float = Field(
        90.0, description="Days after which the raw records of gates are erased; 0 to keep them.", ge=0
    )
    lease_seconds: float = Field(30.0, description="How long a runner holds a job without a renewal.", gt=0)
    release_lease_seconds: float = Field(
        15.0,
        description="How long a control worker holds a release without a renewal: what a canary waits for another when "
        "its own was killed. A policy's `dead_man_seconds` must be more.",
        gt=0,
    )
    control_silence_seconds: float = Field(
        30.0,
        description="How long messages may wait for a control worker that takes none before it ends, so that whoever "
        "keeps it up starts it anew.",
        ge=10,
    )
    idempotency_seconds: float = Field(
        86400.0, description="How long an answer is kept for a request that is sent again under its key.", gt=0
    )
    requests_per_second: float = Field(
        200.0, description="Requests a second that one token may send for ever, to one process; 0 for no limit.", ge=0
    )
    requests_burst: int = Field(1000, description="Requests that one token may send at once after a silence.", ge=1)
    checkpoint_seconds: float = Field(
        300.0, description="Longest time, in seconds, that recorded evidence waits for a signed checkpoint.", gt=0
    )
    database_pool: int = Field(
        10,
        description="Database connections that a worker, or the API, keeps; when busy, up to twice as many are open. "
        "Each of the API's processes has an equal share, but at least 5, or all where these are fewer, and one more "
        "that listens: 4 processes keep 24 and open up to 44.",
        ge=1,
    )
    api_processes: int | None = Field(
        None, description="Processes of the API; unset is one a processor, up to 4.", ge=1, le=MOST_PROCESSES
    )


class RunnerSettings(BaseSettings):
    """Settings of a runner: no database, no signing key."""

    model_config = SettingsConfigDict(
        env_prefix="SLUICEGATE_RUNNER__",
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        hide_input_in_errors=True,  # as above
    )

    name: str = Field(description="Stable name of this runner on its host.")
    runner_class: str = Field(description="Class it takes jobs for.")
    api_url: str = Field(description="Address of the API.")
    token: SecretStr = Field(description="Token with the role runner.")
    broker_url: BrokerUrl = Field(description="Broker that rings when there is work: the service's.")
    broker_ca: Path | None = Field(
        None, description="PEM file of the authorities that vouch for the broker's certificate; none for the system's."
    )
    data_dir: Path = Field(description="Folder for staged files, logs and replicas.")
    store_dir: Path | None = Field(
        None, description="The blob store, when it is on this machine: files are linked, not fetched."
    )
    engines: dict[str, Path] = Field(
        {},
        description="Python environments of engines that have one of their own, by engine; otherwise `.venv-<engine>` "
        "beside this program's.",
    )
    launcher: LauncherName = Field("process", description="How engines are started: process, container or kubernetes.")
    hardware: Path | None = Field(
        None,
        description="JSON of the hardware that engines get, where it is not this machine's: that of one node.",
    )
    engine_memory_bytes: int | None = Field(None, description="Most main memory of one engine, in bytes.", ge=2**20)
    engine_files: int = Field(65_536, description="Files that one engine may have open at once.", ge=64)
    engine_processes: int | None = Field(
        None, description="Most processes and threads: of one container, or of the account that runs engines.", ge=16
    )
    engine_nice: int = Field(0, description="Niceness of engines that are processes.", ge=0, le=19)
    container_program: str = Field("podman", description="Container engine: podman or docker, by name or path.")
    container_gpus: Literal["cdi", "runtime"] = Field(
        "cdi", description="How containers get accelerators: cdi names devices, runtime is docker's --gpus."
    )
    container_network: str = Field(
        "none",
        description="Network of containers on which their port is published; none is none at all, but a socket.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:=,-]*$",
    )
    container_seccomp: Path | None = Field(
        None, description="Profile of system calls for containers; none for the container engine's own."
    )
    container_pull: Literal["missing", "never"] = Field(
        "missing", description="Which images are pulled, by digest: those that are missing, or none."
    )
    kubernetes_url: str = Field(
        "https://kubernetes.default.svc", description="Address of the cluster's API.", pattern=r"^https?://[^@\s]+$"
    )
    kubernetes_namespace: str = Field("default", description="Namespace in which pods are made.")
    kubernetes_secrets: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="Folder with the service account's token and ca.crt.",
    )
    kubernetes_claim: str | None = Field(
        None, description="PersistentVolumeClaim that holds the data folder, readable from every node."
    )
    kubernetes_pod: str | None = Field(
        None, description="Name of the pod that this runner is, with which goes what is made for gates."
    )
    kubernetes_network: Literal["closed", "open"] = Field(
        "closed", description="What pods may reach: closed is nothing, by a NetworkPolicy each; open makes none."
    )
    kubernetes_callers: Annotated[str, AfterValidator(_callers)] | None = Field(
        None,
        description="Who may reach the engines of closed pods, with commas between: NAMESPACE/LABEL=VALUE of pods, "
        "such as runner and gateway, or a network, as 10.0.0.0/24; anybody for whoever can reach the cluster's pods. "
        "Nothing is started before it says so.",
    )
    kubernetes_resolvers: Annotated[str, AfterValidator(_addresses)] = Field(
        "169.254.20.10",
        description="Addresses, with commas between, that answer DNS beside the cluster's own pods, for replicas of "
        "several pods: unless set, where NodeLocal DNSCache is.",
    )
    kubernetes_pull_secret: str | None = Field(None, description="Secret by which nodes pull images.")
    slots: int = Field(
        16,
        description="Jobs held at once; each live replica holds one. One of several is kept for bundles that are live "
        "or were, so that a rollback finds one.",
        ge=1,
        le=64,
    )
    kept_bytes: int = Field(
        0,
        description="Most bytes of staged files that are kept for later jobs; 0 for as many as the disk has room for. "
        "What no job uses goes first, longest unused first.",
        ge=0,
    )
    external_hosts: str | None = Field(
        None,
        description="Hosts of external engines that this runner may speak to, separated by commas: HOST has public "
        "addresses and https; inner:HOST:PORT may be inside a network, inner:http://127.0.0.1:PORT on this machine.",
    )
    external_tokens: Path | None = Field(
        None,
        description="Folder with a file for each such host that wants a token: HOST or HOST:PORT, mode 0600.",
    )

    @field_validator("external_hosts")
    @classmethod
    def _are_hosts(cls, told: str | None) -> str | None:
        external_hosts(told or "")
        return told


def explain(error: ValidationError, prefix: str = "SLUICEGATE_") -> str:
    """Return which variables are wrong, without their values: some are secrets."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{prefix}{'__'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in wrong)
