"""Why a replica failed: the classes, and what follows from each for the next try and for the bundle."""

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Class of a replica's failure. What an engine's driver finds in its log is one of these."""

    UNSUPPORTED = "unsupported"
    ENVIRONMENT_DIFFERS = "environment_differs"
    NOT_STARTED = "not_started"
    IMAGE_UNAVAILABLE = "image_unavailable"
    UNSCHEDULABLE = "unschedulable"
    EVICTED = "evicted"
    BAD_ARGUMENT = "bad_argument"
    PORT_IN_USE = "port_in_use"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    MISSING_KERNEL = "missing_kernel"
    SHAPE_MISMATCH = "shape_mismatch"
    WEIGHTS_UNREADABLE = "weights_unreadable"
    TEMPLATE_UNREADABLE = "template_unreadable"
    TIMEOUT = "timeout"
    WRONG_MODEL = "wrong_model"
    IDENTITY_DIFFERS = "identity_differs"
    NO_ANSWER = "no_answer"
    KILLED = "killed"
    CRASHED = "crashed"
    EXITED = "exited"
    ENGINE_DEAD = "engine_dead"
    RANK_LOST = "rank_lost"
    CRASH_LOOP = "crash_loop"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a class means, and what follows.

    `is_transient`: the machine was full or busy, or somebody outside did it, so that it says nothing about the bundle
    and another try may end otherwise. `is_final`: no other try can end otherwise, so there is none. Neither: it may be
    the bundle's fault; a gate fails by it, and a live replica is tried again, but not for ever. `advice` is what a
    person can do.
    """

    meaning: str
    advice: str
    is_transient: bool = False
    is_final: bool = False


FAILURES: dict[Cause, Failure] = {
    Cause.UNSUPPORTED: Failure(
        "The engine's driver cannot run this bundle.", "Change what the engine's driver refuses.", is_final=True
    ),
    Cause.ENVIRONMENT_DIFFERS: Failure(
        "What is installed on the runner is not the environment that the bundle names.",
        "Install that environment, or register the bundle with the one that is there.",
        is_transient=True,
    ),
    Cause.NOT_STARTED: Failure(
        "The system refused to start the process.", "Look at the runner's limits and its folder.", is_transient=True
    ),
    Cause.IMAGE_UNAVAILABLE: Failure(
        "The engine's image is not on the machine and could not be pulled.",
        "Look at what the registry said: the image's name and digest, and who may pull it.",
        is_transient=True,
    ),
    Cause.UNSCHEDULABLE: Failure(
        "No node of the cluster takes it.",
        "Look at what the scheduler said: free accelerators, selectors and taints.",
        is_transient=True,
    ),
    Cause.EVICTED: Failure(
        "The cluster took its node or its place away.",
        "Give engines a priority, or a disruption budget, that keeps them where they are.",
        is_transient=True,
    ),
    Cause.BAD_ARGUMENT: Failure(
        "The engine refused its command line.",
        "Correct engine.arguments; the engine's log names the argument.",
        is_final=True,
    ),
    Cause.PORT_IN_USE: Failure(
        "Another process had the port.", "Nothing, unless it comes again: then find who holds it.", is_transient=True
    ),
    Cause.OUT_OF_MEMORY: Failure(
        "Memory ran out, of the machine, its control group or an accelerator.",
        "Free the machine, or ask for less: context, sequences, a smaller quantization.",
        is_transient=True,
    ),
    Cause.DISK_FULL: Failure("No space was left on a disk.", "Free the runner's disk.", is_transient=True),
    Cause.MISSING_KERNEL: Failure(
        "This engine build has no code for this processor or accelerator.",
        "Serve it on hardware that the build supports, or with a build for this hardware.",
        is_final=True,
    ),
    Cause.SHAPE_MISMATCH: Failure(
        "Weights and configuration do not have the same shapes.",
        "Compare config.json with the tensors: the gate `static` names them.",
        is_final=True,
    ),
    Cause.WEIGHTS_UNREADABLE: Failure(
        "The engine could not read the weights.",
        "Check that the weights are whole, and of an architecture that this engine version reads.",
        is_final=True,
    ),
    Cause.TEMPLATE_UNREADABLE: Failure(
        "The engine could not read the chat template.",
        "Render the chat template by hand; the engine's log names the place.",
        is_final=True,
    ),
    Cause.TIMEOUT: Failure(
        "It was not ready in time.", "Let it load faster, or allow more time in the policy's boot_seconds."
    ),
    Cause.WRONG_MODEL: Failure(
        "It serves, but not under the bundle's name.",
        "Set the engine's served name (alias) to serving.served_name.",
        is_final=True,
    ),
    Cause.IDENTITY_DIFFERS: Failure(
        "It serves under the bundle's name, but otherwise than the bundle says.",
        "Compare the two values of each finding, and correct the bundle or what the engine is started with.",
    ),
    Cause.NO_ANSWER: Failure(
        "It listens, but its first real completion did not end.", "Ask the same of it by hand, on a like machine."
    ),
    Cause.KILLED: Failure(
        "Somebody else ended it by a signal.",
        "Find who did: the kernel does so when the machine's memory runs out.",
        is_transient=True,
    ),
    Cause.CRASHED: Failure(
        "It ended by a signal of its own, such as a segmentation fault.",
        "Look at the last lines of its log, and for this engine version's known faults.",
    ),
    Cause.EXITED: Failure(
        "It ended by itself, whatever its status; nobody had asked for it.", "Look at the last lines of its log."
    ),
    Cause.ENGINE_DEAD: Failure(
        "Its process runs, but it neither answers nor makes progress.", "Look at the last lines of its log."
    ),
    Cause.RANK_LOST: Failure(
        "One of its processes ended while the others ran on, so all of it was ended.",
        "Look at the last lines of its log, and at the accelerator of that process.",
    ),
    Cause.CRASH_LOOP: Failure(
        "It became ready and died, several times in a short while.",
        "Release another bundle, or mend what kills it and resume the release.",
        is_final=True,
    ),
}
"""Every class, with what it means."""


def is_transient(cause: str | None) -> bool:
    """Tell whether another try may end otherwise through no change of the bundle; of what nobody named it may not."""
    return cause is not None and FAILURES[Cause(cause)].is_transient


def is_final(cause: str | None) -> bool:
    """Tell whether no other try can end otherwise."""
    return cause is not None and FAILURES[Cause(cause)].is_final
