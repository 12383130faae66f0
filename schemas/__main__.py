"""Write the JSON Schema of every document to `schemas/generated/`.

`--check` only compares, and exits 1 on a difference.
"""

import json
import sys
from pathlib import Path

from pydantic import TypeAdapter

from schemas.bundle import Bundle
from schemas.checkpoint import Sealed
from schemas.evidence import Envelope, Statement
from schemas.lock import BundleRegistration
from schemas.policy import Policy
from schemas.reference import Reference
from schemas.result import Finding, GateResult, Measurement
from schemas.suite import GoldenSuite, LoadSpec, LoadSuite, StructuredSuite

DOCUMENTS = (
    Bundle,
    BundleRegistration,
    Policy,
    GoldenSuite,
    LoadSuite,
    LoadSpec,
    StructuredSuite,
    Reference,
    GateResult,
    Measurement,
    Finding,
    Statement,
    Envelope,
    Sealed,
)
FOLDER = Path(__file__).parent / "generated"


def render() -> dict[str, str]:
    """Return file name → JSON Schema text."""
    texts = {}
    for model in DOCUMENTS:
        schema = TypeAdapter(model).json_schema(by_alias=True)
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        texts[f"{model.__name__}.schema.json"] = json.dumps(schema, indent=2, sort_keys=True) + "\n"
    return texts


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them. Returns the exit status."""
    stale = [name for name, text in render().items() if not _same(FOLDER / name, text)]
    if arguments == ["--check"]:
        for name in stale:
            sys.stderr.write(f"schemas/generated/{name} is stale; run `make schemas`\n")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(render()[name])
    return 0


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
