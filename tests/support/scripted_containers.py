"""A program that stands where podman or docker would: it checks what it is asked and answers as those do.

It is strict: a verb or an option that neither program has ends it as they would end. What it knows of containers is in
`containers.json` beside it, which tests change as the world does; what it was asked is in `calls.jsonl`.
"""

import json
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -IS
import json, sys
from pathlib import Path

place = Path({place!r})
words = sys.argv[1:]
with (place / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(words) + chr(10))
world = json.loads((place / "containers.json").read_text())
containers = world["containers"]

def end(status, error="", answer=""):
    (place / "containers.json").write_text(json.dumps(world))
    sys.stdout.write(answer)
    sys.stderr.write(error)
    sys.exit(status)

if world["unreachable"]:
    end(1, world["unreachable"])
VALUED = {{"name", "label", "security-opt", "user", "tmpfs", "ipc", "restart", "shm-size", "ulimit", "pids-limit",
          "memory", "memory-swap", "device", "gpus", "publish", "network", "mount", "stop-timeout", "env", "entrypoint",
          "pull", "cap-drop"}}
FLAGS = {{"detach", "read-only", "init"}}

def find(name):
    for one in containers.values():
        if name in (one["Id"], one["Name"].lstrip("/")):
            return one
    end(1, "Error response from daemon: No such container: " + name)

verb, rest = words[0], words[1:]
if verb == "image":
    if rest[-1] not in world["images"]:
        end(1, "Error: No such image: " + rest[-1])
    end(0)
elif verb == "pull":
    if world["pull_error"]:
        end(1, world["pull_error"])
    world["images"].append(rest[-1])
    end(0, "", rest[-1])
elif verb == "run":
    options, image = {{}}, None
    for place_, word in enumerate(rest):
        if not word.startswith("--"):
            image = word
            break
        name, is_valued, value = word[2:].partition("=")
        if (name not in VALUED) if is_valued else (name not in FLAGS):
            end(125, "unknown flag: --" + name)
        options.setdefault(name, []).append(value)
    if image not in world["images"]:
        end(125, "Unable to find image locally")
    name = options["name"][0]
    if any(one["Name"] == "/" + name for one in containers.values()):
        end(125, 'Error response from daemon: Conflict. The container name "/' + name + '" is already in use')
    number = len(containers) + 1
    handle = format(number, "064x")
    containers[handle] = {{
        "Id": handle, "Name": "/" + name,
        "State": {{"Status": "running", "Running": True, "Paused": False, "Restarting": False, "OOMKilled": False,
                  "Dead": False, "Pid": 4000 + number, "ExitCode": 0, "Error": "",
                  "StartedAt": "2026-11-30T04:00:0" + str(number) + ".123456789Z"}},
        "Config": {{"Image": image, "Labels": dict(one.split("=", 1) for one in options["label"])}},
        "NetworkSettings": {{"Ports": {{"8000/tcp": [{{"HostIp": "127.0.0.1", "HostPort": str(40000 + number)}}]}}}},
    }}
    if world["run_error"]:
        containers[handle]["State"].update(Status="created", Running=False, Pid=0, StartedAt="0001-01-01T00:00:00Z")
        end(127, world["run_error"])
    end(0, "", handle + chr(10))
elif verb == "container" and rest[0] == "inspect":
    end(0, "", json.dumps([find(rest[1])]))
elif verb == "ps":
    wanted = [one.split("=", 1)[1].removeprefix("label=").split("=", 1) for one in rest if one.startswith("--filter=")]
    found = [one["Id"] for one in containers.values() if all(one["Config"]["Labels"].get(k) == v for k, v in wanted)]
    end(0, "", "".join(one + chr(10) for one in found))
elif verb == "logs":
    lines = world["log"].splitlines(keepends=True)
    find(rest[-1])
    end(0, "", "".join(lines[-int(rest[0].split("=")[1]):]))
elif verb in ("stop", "kill"):
    state = find(rest[-1])["State"]
    if state["Running"]:
        forced = verb == "kill" or world["stubborn"]
        state.update(Status="exited", Running=False, Pid=0, ExitCode=137 if forced else 0)
    end(0, "", rest[-1])
elif verb == "rm":
    del containers[find(rest[-1])["Id"]]
    end(0, "", rest[-1])
else:
    end(125, "unknown command " + verb)
"""


class ScriptedContainers:
    """The program and its world, in one folder."""

    def __init__(self, place: Path, program: str = "podman") -> None:
        """Put the program into a folder."""
        self.place = place
        self.path = place / program
        self.path.write_text(_PROGRAM.format(python=sys.executable, place=str(place)), encoding="utf-8")
        self.path.chmod(0o755)
        self.set(
            containers={},
            images=[],
            unreachable="",
            pull_error="",
            run_error="",
            stubborn=False,
            log="loading\nready\n",
        )

    def world(self) -> dict[str, Any]:
        """Return what the program knows."""
        path = self.place / "containers.json"
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return known

    def set(self, **changes: Any) -> None:
        """Change what the program knows."""
        (self.place / "containers.json").write_text(json.dumps(self.world() | changes), encoding="utf-8")

    def change(self, handle: str, **state: Any) -> None:
        """Change the state of one container, as the world does."""
        world = self.world()
        world["containers"][handle]["State"].update(state)
        self.set(**world)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        """Return the command lines that it was given so far, of one verb or all."""
        path = self.place / "calls.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [words for words in map(json.loads, lines) if verb is None or words[0] == verb]
