"""What stands where podman or docker would: it checks what it is asked, and answers as those do.

It is strict: a verb or an option that neither program has ends it as they would end. What it knows is in
`containers.json` of its folder, which tests change as the world does; what it was asked is in `calls.jsonl`. Of an
image that is in `programs`, containers really run: what they start is a process of this machine, that finds there what
it would find inside, and where the kernel allows it, without any network but a loopback of its own. Standard library
only, as it is started for each question. Messages and `inspect` are as podman 5 and docker 28 write them.
"""

import contextlib
import csv
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

VALUED = {
    *("name", "label", "security-opt", "user", "tmpfs", "ipc", "restart", "shm-size", "ulimit", "pids-limit"),
    *("memory", "memory-swap", "device", "gpus", "publish", "network", "mount", "stop-timeout", "env", "entrypoint"),
    *("pull", "cap-drop", "hostname", "log-driver", "log-opt", "stop-signal", "oom-score-adj"),
}
FLAGS = {"detach", "read-only", "init", "no-healthcheck"}
INSIDE_PORT = "8000"
ID = "f" * 64
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000


class Program:
    """One call of the program."""

    def __init__(self, place: Path, kind: str) -> None:
        self.place, self.kind = place, kind
        self.world: dict[str, Any] = json.loads((place / "containers.json").read_text(encoding="utf-8"))

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        """What there is, by id."""
        found: dict[str, dict[str, Any]] = self.world["containers"]
        return found

    def end(self, status: int, error: str = "", answer: str = "", *, verb: str = "") -> NoReturn:
        """Keep what is known now, answer, and end."""
        # Renamed into place: tests read it while this writes.
        written(self.place / "containers.json", json.dumps(self.world))
        if verb and self.world["dies"] == verb:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write(answer)
        sys.stderr.write(error)
        sys.exit(status)

    def fail(self, status: int, text: str) -> NoReturn:
        """End with a message as the one or the other says it."""
        self.end(status, f"{'Error' if self.kind == 'podman' else 'Error response from daemon'}: {text}\n")

    def find(self, name: str) -> dict[str, Any]:
        """Return a container by id or name, or end as when there is none."""
        found = next((one for one in self.containers.values() if name in (one["Id"], one["Name"].lstrip("/"))), None)
        if found is not None:
            return self._seen(found)
        if self.kind == "podman":
            return self.fail(125, f'no container with name or ID "{name}" found: no such container')
        return self.fail(1, f"No such container: {name}")

    def _seen(self, one: dict[str, Any]) -> dict[str, Any]:
        """Return a container as it is now: what it runs may have ended."""
        told = self.folder(one) / "exit"
        if one["State"]["Running"] and told.exists():
            ended(one, int(told.read_text(encoding="ascii")))
            one["State"]["OOMKilled"] = one["Id"] in self.world["out_of_memory"]
        return one

    def folder(self, one: dict[str, Any]) -> Path:
        """Where what a container writes and runs is kept."""
        return self.place / "c" / str(one["Id"])[-4:]

    # ------------------------------------------------------------------------------------------------ verbs

    def image(self, rest: list[str]) -> NoReturn:
        """Tell whether an image is there."""
        if rest[-1] not in self.world["images"]:
            self.fail(1, f"No such image: {rest[-1]}")
        self.end(0)

    def pull(self, rest: list[str]) -> NoReturn:
        """Get an image, or not."""
        if self.world["pull_error"]:
            self.end(1, self.world["pull_error"])
        self.world["images"].append(rest[-1])
        self.end(0, "", rest[-1])

    def run(self, rest: list[str]) -> NoReturn:
        """Make a container and start what is in it."""
        options, image, arguments = self._read(rest)
        if image not in self.world["images"]:
            self.end(125, "Unable to find image locally")
        name = options["name"][0]
        if any(one["Name"] == "/" + name for one in self.containers.values()):
            if self.kind == "podman":
                self.fail(125, f'creating container storage: the container name "{name}" is already in use by {ID}')
            self.fail(125, f'Conflict. The container name "/{name}" is already in use by container "{ID}"')
        self.world["made"] += 1
        one = made(self.world["made"], name, image, options, arguments)
        self.containers[one["Id"]] = one
        if self.world["run_error"]:
            one["State"].update(Status="created", Running=False, Pid=0, StartedAt="0001-01-01T00:00:00Z")
            self.end(127, self.world["run_error"])
        if image in self.world["programs"]:
            self._really_run(one, options, [options["entrypoint"][0], *arguments], self.world["programs"][image])
        self.end(0, "", one["Id"] + "\n", verb="run")

    def _read(self, rest: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
        options: dict[str, list[str]] = {}
        for place, word in enumerate(rest):
            if not word.startswith("--"):
                return options, word, rest[place + 1 :]
            name, is_valued, value = word[2:].partition("=")
            if name not in (VALUED if is_valued else FLAGS):
                self.end(125, f"unknown flag: --{name}")
            options.setdefault(name, []).append(value)
        return self.end(125, "requires at least 1 argument")

    def _really_run(
        self, one: dict[str, Any], options: dict[str, list[str]], argv: list[str], words: dict[str, str]
    ) -> None:
        folder = self.folder(one)
        (folder / "tmp").mkdir(parents=True)
        outside, port = {"/tmp": str(folder / "tmp")}, str(free_port())
        for mount in options.get("mount", []):
            told = dict(part.partition("=")[::2] for part in next(csv.reader([mount])))
            outside[told["target"]] = told["source"]

        def seen_outside(word: str) -> str:
            for inside, place in sorted(outside.items(), reverse=True):
                if word == inside or word.startswith(f"{inside}/"):
                    return place + word[len(inside) :]
            return port if word == INSIDE_PORT else words.get(word, word)

        env = dict(part.partition("=")[::2] for part in options.get("env", []))
        orders = {
            "argv": [seen_outside(word) for word in argv],
            "env": {key: seen_outside(value) for key, value in env.items()} | {"PATH": os.environ["PATH"]},
            "apart": options.get("network") == ["none"],
        }
        subprocess.Popen(
            [sys.executable, "-IS", __file__, "supervise", str(folder), json.dumps(orders)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "trouble").open("wb"),
            start_new_session=True,
            cwd=folder,
        )
        while not (folder / "pid").exists():
            time.sleep(0.01)
        one["State"]["Pid"] = int((folder / "pid").read_text(encoding="ascii"))
        for bindings in one["NetworkSettings"]["Ports"].values():
            bindings[0]["HostPort"] = port

    def container(self, rest: list[str]) -> NoReturn:
        """Tell of a container."""
        self.end(0, "", json.dumps([self.find(rest[1])]))

    def ps(self, rest: list[str]) -> NoReturn:
        """List those that have the labels."""
        wanted = [
            one.split("=", 1)[1].removeprefix("label=").split("=", 1) for one in rest if one.startswith("--filter=")
        ]
        found = [
            one["Id"] for one in self.containers.values() if all(one["Config"]["Labels"].get(k) == v for k, v in wanted)
        ]
        self.end(0, "", "".join(one + "\n" for one in found))

    def logs(self, rest: list[str]) -> NoReturn:
        """Show the last lines."""
        log = self.folder(self.find(rest[-1])) / "log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else self.world["log"]
        self.end(0, "", "".join(text.splitlines(keepends=True)[-int(rest[0].split("=")[1]) :]))

    def stop(self, rest: list[str]) -> NoReturn:
        """Ask what runs to end, then end it."""
        self._end(rest[-1], signal.SIGTERM, float(rest[1]))

    def kill(self, rest: list[str]) -> NoReturn:
        """End what runs."""
        self._end(rest[-1], signal.SIGKILL, 0.0)

    def _end(self, name: str, number: signal.Signals, patience_seconds: float) -> NoReturn:
        one = self.find(name)
        if one["State"]["Running"]:
            if (self.folder(one) / "pid").exists():
                self._really_end(one, number, patience_seconds)
            else:
                forced = number is signal.SIGKILL or self.world["stubborn"]
                ended(one, 137 if forced else 0)
        self.end(0, "", name)

    def _really_end(self, one: dict[str, Any], number: signal.Signals, patience_seconds: float) -> None:
        signalled(one, number)
        deadline = time.monotonic() + patience_seconds
        while number is not signal.SIGKILL and self._seen(one)["State"]["Running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        if one["State"]["Running"]:
            signalled(one, signal.SIGKILL)
        while self._seen(one)["State"]["Running"]:
            time.sleep(0.02)

    def rm(self, rest: list[str]) -> NoReturn:
        """Remove a container, and end what runs in it."""
        one = self.find(rest[-1])
        if one["State"]["Running"] and (self.folder(one) / "pid").exists():
            self._really_end(one, signal.SIGKILL, 0.0)
        del self.containers[one["Id"]]
        self.end(0, "", rest[-1])


def signalled(one: dict[str, Any], number: signal.Signals) -> None:
    """Signal what a container runs, if it still does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(one["State"]["Pid"], number)


def ended(one: dict[str, Any], code: int) -> None:
    """Let a container have ended."""
    one["State"].update(Status="exited", Running=False, Pid=0, ExitCode=code)


def made(number: int, name: str, image: str, options: dict[str, list[str]], arguments: list[str]) -> dict[str, Any]:
    """Return a new container as `inspect` shows it, with what is read of it."""
    is_alone = options.get("network") == ["none"]
    if is_alone and "publish" in options:
        raise SystemExit("a port is published of a container that has no network")
    ports = {} if is_alone else {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(40000 + number)}]}
    return {
        "Id": format(number, "064x"),
        "Name": "/" + name,
        "State": {
            "Status": "running",
            "Running": True,
            "Paused": False,
            "Restarting": False,
            "OOMKilled": False,
            "Dead": False,
            "Pid": 4000 + number,
            "ExitCode": 0,
            "Error": "",
            "StartedAt": f"2026-11-30T04:00:{number:02}.123456789Z",
        },
        "Config": {
            "Image": image,
            "Labels": dict(one.split("=", 1) for one in options["label"]),
            "Entrypoint": options["entrypoint"],
            "Cmd": arguments,
            "Env": ["PATH=/usr/bin:/bin", *options.get("env", [])],
        },
        "HostConfig": {
            "ReadonlyRootfs": "read-only" in options,
            "Privileged": False,
            "NetworkMode": options["network"][0],
        },
        "NetworkSettings": {"Ports": ports},
    }


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def leave_the_network() -> None:
    """Go where there is no network but a loopback of its own, where the kernel lets this account do so."""
    import ctypes  # it takes longer than most answers

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        name, up = b"lo", 0x1 | 0x40
        fcntl.ioctl(asked, 0x8914, struct.pack("16sH14x", name, up))  # SIOCSIFFLAGS


def supervise(folder: Path, orders: dict[str, Any]) -> None:
    """Run what is in a container, and tell how it ended."""
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            orders["argv"],
            env=orders["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            preexec_fn=leave_the_network if orders["apart"] else None,  # noqa: PLW1509 - there is one thread
            start_new_session=True,
        )
    written(folder / "pid", str(child.pid))
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # nothing outlives a container's first process
    written(folder / "exit", str(code if code >= 0 else 128 - code))


def written(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    path.with_suffix(".new").write_text(text, encoding="ascii")
    path.with_suffix(".new").replace(path)


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Let one call at a time go on."""
    with (place / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(place: Path, kind: str, words: list[str]) -> None:
    """Answer one call."""
    with (place / "calls.jsonl").open("a", encoding="utf-8") as calls:
        calls.write(json.dumps(words) + "\n")
    with alone(place):
        program = Program(place, kind)
        if program.world["unreachable"]:
            program.end(1, program.world["unreachable"])
        verb = words[0]
        if verb not in {"image", "pull", "run", "container", "ps", "logs", "stop", "kill", "rm"}:
            program.end(125, f"unknown command {verb}")
        getattr(program, verb)(words[1:])


if __name__ == "__main__":
    supervise(Path(sys.argv[2]), json.loads(sys.argv[3]))
