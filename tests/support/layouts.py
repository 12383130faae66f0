"""What a library's model classes write, with small sizes: names and shapes of tensors by layer, and the settings."""

import json
from pathlib import Path
from typing import Any

from tests.support.checkpoints import T, write_json, write_safetensors

LAYOUTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("layouts.json").read_text("utf-8"))["layouts"]


def config_of(name: str) -> dict[str, Any]:
    """Return a layout's config.json."""
    config: dict[str, Any] = LAYOUTS[name]["config"]
    return config


def tensors_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name."""
    told, config = LAYOUTS[name], config_of(name)
    keys = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((config[key] for key in keys if config.get(key)), 0)
    found = {one: tuple(shape) for one, shape in told["tensors"].items()}
    for kind in told["kinds"]:
        for layer in kind["layers"]:
            for rest, shape in kind["tensors"].items():
                for one in [rest.replace("*", str(n)) for n in range(experts)] if "*" in rest else [rest]:
                    found[f"{told['prefix']}.{layer}.{one}"] = tuple(shape)
    return found


def write_layout(root: Path, name: str, *, without: str | None = None, **changes: Any) -> Path:
    """Write a layout into a folder, which is made.

    Args:
        root: of the files.
        name: of the layout.
        without: leave out the tensors whose names end so.
        changes: of config.json.
    """
    root.mkdir(parents=True)
    write_json(root / "config.json", config_of(name) | changes)
    shapes = tensors_of(name).items()
    kept = [T(one, "BF16", shape) for one, shape in shapes if without is None or not one.endswith(without)]
    write_safetensors(root / "model.safetensors", kept)
    return root
