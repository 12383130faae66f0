"""Runners, jobs and replicas: what the machines that run models say to the service and hear from it."""

from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, StringConstraints, model_validator

from schemas.common import Closed, Digest, Instant, Integer, Name, Positive, ShortText, Text, Wire
from schemas.failures import Cause


class ReplicaState(StrEnum):
    """Lifecycle of one engine instance."""

    STAGED = "staged"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


RUNNING = frozenset(ReplicaState) - {ReplicaState.STOPPED, ReplicaState.FAILED}
"""States of a replica that runs, or is about to."""


class JobKind(StrEnum):
    """What a runner is asked to do."""

    EVALUATE = "evaluate"
    """Stage, boot once, run every gate, stop."""
    SERVE = "serve"
    """Keep one replica ready for live traffic until told otherwise."""
    RECORD = "record"
    """Boot and record a reference for a golden suite."""


class JobState(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    CLAIMED = "claimed"
    DONE = "done"
    CANCELLED = "cancelled"


LauncherName = Literal["process", "container", "kubernetes"]
"""How a runner starts engines: what is installed on it, or images."""


class Accelerator(Closed):
    """One accelerator as the driver reports it."""

    sku: ShortText = Field(description="Product name.")
    memory_bytes: Positive = Field(description="Memory in bytes.")
    mig: ShortText | None = Field(None, description="MIG profile.")
    numa: Integer | None = Field(None, description="NUMA node that it is attached to.")


class Fingerprint(Closed):
    """Exact hardware of a runner."""

    cpu: ShortText = Field(description="Processor model.")
    cpu_flags: ShortText = Field(description="Instruction sets that change kernels, such as avx2 avx512f, sorted.")
    cores: Positive = Field(description="Logical processors.")
    memory_bytes: Positive = Field(description="Main memory in bytes.")
    accelerators: list[Accelerator] = Field(description="Accelerators; empty on a CPU machine.")
    driver: ShortText | None = Field(None, description="Accelerator driver version.")
    cuda: ShortText | None = Field(None, description="CUDA version.")
    links: ShortText | None = Field(
        None, description="How accelerators are linked, beginning with the slowest kind between any two: nvlink, pcie."
    )
    kernel: ShortText = Field(description="Operating system kernel.")


class Agreement(StrEnum):
    """What a comparison of one thing comes to. Only `equal` says that both sides were there and agree."""

    EQUAL = "equal"
    DIFFERS = "differs"
    NOT_REPORTED = "not_reported"
    """The bundle says it, and the engine does not."""
    NOT_DECLARED = "not_declared"
    """The engine says it, and neither the bundle nor its files do."""


class Compared(Closed):
    """One thing that an engine which booted was held against its bundle in."""

    item: ShortText = Field(description="What, such as context_tokens or sampling.top_p.")
    outcome: Agreement = Field(description="equal, differs, not_reported or not_declared.")
    expected: Text | None = Field(None, description="What the bundle says; a long text as its digest.")
    found: Text | None = Field(None, description="What the engine says; a long text as its digest.")
    expected_by: ShortText | None = Field(None, description="Section, file or launch argument that says it.")
    found_by: ShortText | None = Field(None, description="Where the engine says it.")


class EngineIdentity(Closed):
    """What really booted."""

    name: ShortText = Field(description="Engine.")
    version: ShortText = Field(
        description="Version that it reports; where it reports none, that of the distribution installed, else the "
        "bundle's."
    )
    image: ShortText | None = Field(None, description="Container image by digest that it was started from.")
    environment: Digest | None = Field(None, description="Digest of its environment.")
    basis: Literal["reported"] | None = Field(
        None,
        description="reported: known only by what its endpoint says of itself, which is weaker than a digest of what "
        "was started; absent where something was.",
    )
    arguments: list[Annotated[str, StringConstraints(max_length=4096)]] = Field(
        description="Full command line, as the kernel shows it where that can be seen."
    )
    model_ids: list[ShortText] = Field(description="Ids in /v1/models.")
    context_tokens: Integer = Field(description="Context per request that it serves; 0 when not reported.")


RunnerClass = Name
"""Queue of runners with like hardware, such as cpu-x86."""


SPEAKS = 1
"""What this version's runners understand of claims. 1: a drill reserves the accelerators of two replicas, the job's own
first, and a job that is not wanted is claimed to end what is left of it."""


class RunnerRegistration(Closed):
    """A runner says who it is."""

    name: Name = Field(description="Stable name of the runner on its host.")
    runner_class: RunnerClass = Field(description="Class it takes jobs for.")
    fingerprint: Fingerprint = Field(description="Its hardware.")
    engines: Annotated[list[ShortText], Field(max_length=32)] = Field(description="Engines it can boot.")
    boot_id: ShortText = Field(description="The host's boot id.")
    slots: Annotated[int, Field(ge=1, le=64, strict=True)] | None = Field(
        None, description="Jobs it holds at once; one of several is kept for bundles that are live or were."
    )
    environments: Annotated[dict[ShortText, Digest], Field(max_length=32)] | None = Field(
        None, description="Engine → digest of the environment that it is installed in here."
    )
    launcher: LauncherName | None = Field(None, description="How it starts engines; as processes when it does not say.")
    disk_free_bytes: Integer | None = Field(None, description="Disk left where files are staged, in bytes.")
    device_ids: Annotated[list[ShortText], Field(max_length=1024)] | None = Field(
        None, description="What the driver calls the accelerators of the fingerprint, in their order."
    )
    speaks: Integer | None = Field(
        None, description="Version of claims that it understands; an older runner does not say, and is not given all."
    )


class Drain(Wire):
    """A runner that takes no job any more."""

    since: Instant = Field(description="When it was drained.")
    by: str = Field(description="By whom.")
    reason: str = Field(description="Why.")
    waits_for: list[str] = Field(description="What it still holds, a sentence each; empty when it may be switched off.")
    empty_at: Instant | None = Field(description="When what it holds is ended; null for never.")


class Undrained(Wire):
    """That a runner which drained takes jobs again."""

    since: Instant = Field(description="When it was let.")
    by: str = Field(description="By whom.")
    reason: str | None = Field(description="Why, where that was said.")


class Reservation(Wire):
    """What the jobs that a runner holds have reserved of it, while their leases last."""

    accelerators: list[int] = Field(description="Accelerators, by their place in the fingerprint.")
    memory_bytes: int = Field(description="Main memory, for engines on the processor.")


class Runner(Wire):
    """A registered runner."""

    id: UUID = Field(description="Identity.")
    name: str = Field(description="Name.")
    runner_class: str = Field(description="Class.")
    fingerprint: Fingerprint = Field(description="Hardware.")
    engines: list[str] = Field(description="Engines.")
    last_seen_at: Instant = Field(description="Last heartbeat.")
    is_alive: bool = Field(description="Whether the last heartbeat is younger than 30 s.")
    slots: int | None = Field(description="Jobs it holds at once; null when it did not say.")
    jobs: list[UUID] = Field(description="Jobs it holds now.")
    reserved: Reservation = Field(description="What they have reserved.")
    environments: dict[str, str] = Field(description="Engine → digest of its environment, as far as it said so.")
    launcher: LauncherName = Field(description="How it starts engines.")
    disk_free_bytes: int | None = Field(description="Disk that it had left when it last said so, in bytes.")
    drain: Drain | None = Field(description="Why it takes no job, and what it still holds; null when it takes jobs.")
    undrained: Undrained | None = Field(
        description="Who let it take jobs again last, and why; null while it drains, or if it never did."
    )
    generation: int = Field(description="Grows with each drain, and with its end; for If-Match.")


class Claim(Wire):
    """A job taken by a runner under a lease."""

    job: UUID = Field(description="Job.")
    kind: JobKind = Field(description="What to do.")
    fencing_token: int = Field(description="Sent with every report; a stale one is refused.")
    lease_seconds: float = Field(description="Renew before this many seconds pass.")
    release: UUID | None = Field(description="Release it serves, if any.")
    target: str | None = Field(description="Target name@environment, if any.")
    bundle: str = Field(description="Bundle digest.")
    policy: str | None = Field(description="Policy digest.")
    suites: list[str] = Field(description="Digests of suites the job needs.")
    references: dict[str, str] = Field(description="Suite digest → reference digest frozen for this release.")
    gates: list[str] = Field(description="Gates to run, in order; those with a verdict are left out.")
    attempt: int = Field(description="1 for the first try.")
    replica: dict[str, str | int] | None = Field(description="Process identity of a replica to adopt, if one was left.")
    accepted: str | None = Field(
        description="Bundle that the target's traffic would go back to; none when it has accepted no other."
    )
    devices: list[int] = Field(description="Accelerators reserved for it, by their place in the runner's fingerprint.")
    is_wanted: bool = Field(description="False: find the engine that was left, end it, and boot none.")
    planned_bytes: int | None = Field(
        description="Bytes of a machine's memory that its replica takes by a plan; null without one."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, told: object) -> object:
        """Read claims of a service, and of a file, from before plans were told of."""
        return {"planned_bytes": None, **told} if isinstance(told, dict) else told


class Renewal(Wire):
    """Answer to a lease renewal."""

    lease_seconds: float = Field(description="Seconds until the lease runs out.")
    is_wanted: bool = Field(description="False: drain, stop and complete the job.")


class Report(Closed):
    """Something that happened in a job: becomes one evidence entry at most once."""

    fencing_token: Integer = Field(description="From the claim.")
    act: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_.:-]{1,120}$")] = Field(
        description="Name of the act in the job; repeating it changes nothing."
    )
    kind: ShortText = Field(description="Evidence kind.")
    body: dict[str, object] = Field(description="Body of that kind.")


class ReplicaReport(Closed):
    """A replica changed state."""

    state: ReplicaState = Field(description="New state.")
    cause: Text = Field(description="Why, in one sentence.")
    failure: Cause | None = Field(None, description="Class of a failure.")
    address: ShortText | None = Field(None, description="host:port once it listens.")
    pid: Integer | None = Field(None, description="Process id on the runner.")
    start_time: ShortText | None = Field(None, description="Process start time, with pid and boot id its identity.")
    boot_id: ShortText | None = Field(None, description="The host's boot id.")
    log_tail: Annotated[list[Annotated[str, StringConstraints(max_length=2000)]], Field(max_length=50)] | None = Field(
        None, description="Last log lines, after a failure."
    )
