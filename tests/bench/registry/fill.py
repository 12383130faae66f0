"""Rows by the hundred thousand, as the service would have written them: every entry is signed, linked and verifies.

The service writes one bundle and the logs of a few releases; the others are those again, with their own names, hashes,
signatures and links. The first of each batch is compared with what the product's own code makes of the same.
"""

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from uuid6 import uuid7

from gates.evidence import Record, claim_of, verify_signature
from registry import blobs as stored
from registry.keys import Signer
from schemas.bundle import Bundle
from schemas.common import canonical_json, format_instant, sha256_digest
from schemas.evidence import GENESIS, PAYLOAD_TYPE, Envelope, pre_authentication_encoding
from tests.support.factories import bundle_body, file_entry

FAMILIES = 500
"""Names that bundles share."""
TEAMS = 50
SHARDS = 8
BATCH = 250
"""Releases whose entries are written one after the other in turns, as those of releases under way at once are."""

ENTRIES = (
    "COPY entries (id, project_id, stream, position, act, kind, actor, recorded_at, envelope, previous, entry_digest,"
    " key_id) FROM STDIN"
)


def shared_files() -> dict[str, bytes]:
    """Return path → content of the files that every bundle of the bench shares."""
    shards = {f"model-{place:05}-of-{SHARDS:05}.safetensors": f"shard {place}\n".encode() for place in range(1, SHARDS)}
    return {
        **shards,
        "config.json": b"{}\n",
        "generation_config.json": b"{ }\n",
        "model.safetensors.index.json": b"{  }\n",
        "tokenizer.json": b"{   }\n",
    }


ROLES = {"config.json": "config", "generation_config.json": "generation_config", "tokenizer.json": "tokenizer"}
INDEX = "model.safetensors.index.json"


def body(number: int, weights: bytes = b"shard 0\n") -> dict[str, Any]:
    """Return a bundle of twelve files, as large as those of published models; `weights` are its own shard."""
    files = [file_entry(f"model-00000-of-{SHARDS:05}.safetensors", weights, "weights")]
    for path, content in shared_files().items():
        role = "weights_index" if path == INDEX else ROLES.get(path, "weights")
        files.append(file_entry(path, content, role))
    files.sort(key=lambda entry: entry["path"])
    made = bundle_body(name(number), files=files, tokenizer={"origin": "files"}, description=f"bundle {number}")
    made["engine"] |= {"name": "vllm"}
    return made | {"model": {"format": "safetensors", "architecture": "llama"}, "labels": labels(number)}


def name(number: int) -> str:
    """Return the family of a bundle."""
    return f"family-{number % FAMILIES:03}"


def labels(number: int) -> dict[str, str]:
    """Return the labels of a bundle: a team that has every fiftieth, and a stage that has half of all."""
    return {"team": f"team-{number % TEAMS:02}", "stage": "trial" if number % 2 else "production"}


@dataclass(frozen=True)
class Model:
    """What a log looks like: entries of one stream, whose names are replaced to make others."""

    entries: tuple[tuple[str, str, str, bytes], ...]
    """(act, kind, actor, payload)."""
    stream: str
    old: tuple[bytes, ...]
    """What stands in the payloads, to be replaced."""


@dataclass(frozen=True)
class Place:
    """Where rows go, and who signs them."""

    url: str
    key: Path
    project: UUID


class Pen:
    """Signs and links entries."""

    def __init__(self, place: Place) -> None:
        """Read the key."""
        self._signer = Signer.load(place.key)
        self._key = self._signer._current.key
        self.key_id = self._signer.key_id
        self.project = str(place.project)
        self._is_checked = False

    def proof(self, blob: str, size: int) -> str:
        """Return what the service signs of a blob that the project has sent."""
        return stored.proof(self._signer, self.project, blob, size)

    def line(
        self, stream: str, position: int, previous: str, act: str, kind: str, actor: str, payload: bytes
    ) -> tuple[str, str]:
        """Return one line for COPY, and the entry's digest."""
        signature = self._key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
        envelope = (
            f'{{"payload":"{base64.b64encode(payload).decode()}","payloadType":"{PAYLOAD_TYPE}","signatures":'
            f'[{{"keyid":"{self.key_id}","sig":"{base64.b64encode(signature).decode()}"}}]}}'
        ).encode()
        identity, at = uuid7(), datetime.now(UTC)
        hashed = (
            f'{{"act":"{act}","envelope_sha256":"{sha256_digest(envelope)}","id":"{identity}","kind":"{kind}",'
            f'"position":{position},"previous":"{previous}","project":"{self.project}",'
            f'"recorded_at":"{format_instant(at)}","stream":"{stream}"}}'
        )
        digest = "sha256:" + hashlib.sha256(hashed.encode()).hexdigest()
        if not self._is_checked:
            self._check(
                Record(
                    0, identity, UUID(self.project), stream, position, act, kind, actor, at, envelope, previous,
                    digest, self.key_id,
                )
            )  # fmt: skip
        row = (
            identity, self.project, stream, position, act, kind, actor, at.isoformat(), rf"\\x{envelope.hex()}",
            previous, digest, self.key_id,
        )  # fmt: skip
        return "\t".join(map(str, row)) + "\n", digest

    def _check(self, record: Record) -> None:
        """Compare an entry with what the product makes of the same: the rest is written the same way."""
        envelope = Envelope.model_validate_json(record.envelope)
        assert canonical_json(envelope.model_dump(mode="json", by_alias=True)) == record.envelope
        assert verify_signature(envelope, self._signer.public_key_pem) is None
        assert record.link() == record.entry_digest
        assert claim_of(record.envelope)["stream"] == record.stream
        self._is_checked = True


@contextmanager
def writing(place: Place) -> Iterator[psycopg.Cursor]:
    """Yield a cursor whose writes fire no trigger and look up no key; all of it is committed at the end."""
    with psycopg.connect(place.url.replace("postgresql+psycopg://", "postgresql://")) as connection:
        cursor = connection.cursor()
        cursor.execute("SET session_replication_role = replica")
        yield cursor


def bundles(place: Place, model: Model, numbers: range) -> int:
    """Write bundles with their registrations. Returns how many entries that made."""
    pen, now = Pen(place), datetime.now(UTC).isoformat()
    members, stored, marked, blobs, entries, files = [], [], [], [], [], []
    template = Bundle.model_validate(body(0))
    components = template.components()
    for number in numbers:
        document = body(number, f"shard 0 of {number}\n".encode())
        canonical = compact(document)
        weights = [one for one in document["files"] if one["role"] in {"weights", "weights_index", "config"}]
        mine = components | {"weights": digest_of({"files": weights, "model": document["model"]})}
        serving = digest_of(mine)
        if number == numbers.start:
            checked = Bundle.model_validate(document)
            assert (checked.canonical(), checked.components()) == (canonical, mine)
            assert checked.serving_digest == serving
        digest = sha256_digest(canonical)
        shard = document["files"][2]["sha256"]
        assert document["files"][2]["path"].startswith("model-00000")
        files += [f"{pen.project}\t{digest}\t{one}\n" for one in {file["sha256"] for file in document["files"]}]
        blobs.append(f"{shard}\t{document['files'][2]['size']}\t{now}\n")
        identity, held = uuid7(), labels(number)
        derived = (rf"\\x{canonical.hex()}", serving, json.dumps(mine), json.dumps(held))
        stored.append("\t".join((digest, "bundle", Bundle.SCHEMA_ID, *derived)) + "\n")
        marked += [f"{pen.project}\t{digest}\t{label}\t{value}\t{identity}\n" for label, value in held.items()]
        stream = f"documents/{pen.project}/{digest}"
        act, kind, actor, payload = model.entries[0]
        predicate = json.loads(payload)
        stated = predicate["predicate"]["stated_at"]
        members.append(f"{pen.project}\t{digest}\t{identity}\tbundle\t{name(number)}\t{stated}\t{actor}\n")
        predicate["subject"][0]["digest"]["sha256"] = digest.removeprefix("sha256:")
        predicate["predicate"]["stream"] = stream
        predicate["predicate"]["body"] = {
            "components": mine, "digest": digest, "name": name(number), "serving_digest": serving,
        }  # fmt: skip
        entries.append(pen.line(stream, 1, GENESIS, act, kind, actor, compact(predicate))[0])
    with writing(place) as cursor:
        copy(cursor, "COPY blobs (digest, size, created_at) FROM STDIN", blobs)
        held = (line.split(chr(9))[:2] for line in blobs)
        rows = [f"{pen.project}\t{one}\t{now}\t{now}\t{pen.proof(one, int(size))}\n" for one, size in held]
        copy(cursor, "COPY project_blobs (project_id, digest, created_at, used_at, proof) FROM STDIN", rows)
        columns = "digest, kind, schema_id, body, serving_digest, components, labels"
        copy(cursor, f"COPY documents ({columns}) FROM STDIN", stored)
        columns = "project_id, digest, id, kind, name, created_at, created_by"
        copy(cursor, f"COPY project_documents ({columns}) FROM STDIN", members)
        copy(cursor, "COPY project_labels (project_id, digest, name, value, id) FROM STDIN", marked)
        copy(cursor, "COPY bundle_blobs (project_id, bundle, blob) FROM STDIN", files)
        copy(cursor, ENTRIES, entries)
    return len(entries)


def releases(place: Place, model: Model, columns: str, rows: list[tuple[str, str, str, str]]) -> int:
    """Write releases with their logs. Returns how many entries that made.

    `columns` copies the row that the service wrote of the model; `rows` are (id, target id, target name, bundle).
    """
    pen, made = Pen(place), 0
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        lines: list[str] = []
        heads = dict.fromkeys((row[0] for row in batch), GENESIS)
        for position, (act, kind, actor, payload) in enumerate(model.entries, start=1):
            for identity, _, target, bundle in batch:
                mine = payload
                for old, new in zip(model.old, (identity, target, bundle.removeprefix("sha256:")), strict=True):
                    mine = mine.replace(old, new.encode())
                line, heads[identity] = pen.line(
                    f"release/{identity}", position, heads[identity], act, kind, actor, mine
                )
                lines.append(line)
        with writing(place) as cursor:
            copy(cursor, ENTRIES, lines)
            for identity, target_id, _, bundle in batch:
                cursor.execute(columns, {"id": identity, "target": target_id, "bundle": bundle})
            # The fold of a log begins and ends with the instants of its own entries.
            cursor.execute(
                """
                UPDATE releases SET phase_since = moved.recorded_at,
                    step_since = CASE WHEN releases.step_since IS NULL THEN NULL ELSE shifted.recorded_at END
                FROM entries AS first, entries AS moved, entries AS shifted
                WHERE releases.id = ANY(%(ids)s)
                AND first.stream = 'release/' || releases.id AND first.position = 1
                AND moved.stream = first.stream AND moved.position = %(moved)s
                AND shifted.stream = first.stream AND shifted.position = %(shifted)s
                """,
                {"ids": [row[0] for row in batch], "moved": _last(model, MOVES), "shifted": _last(model, SHIFTS)},
            )
        made += len(lines)
    return made


MOVES = {"created", "staged", "engine_booted", "gates_passed", "approved", "promoted", "replaced"}
SHIFTS = {"created", "traffic_shifted"}


def _last(model: Model, kinds: set[str]) -> int:
    """Return the position of the last entry of these kinds that is not a note of a second boot."""
    seen: set[str] = set()
    found = 1
    for position, (_, kind, _, _) in enumerate(model.entries, start=1):
        if kind in kinds and (kind not in seen or kind == "traffic_shifted"):
            found = position
        seen.add(kind)
    return found


def copy(cursor: psycopg.Cursor, statement: str, lines: list[str]) -> None:
    """Write lines into a table."""
    with cursor.copy(statement) as into:
        for begin in range(0, len(lines), 200):
            into.write("".join(lines[begin : begin + 200]))


def compact(value: Any) -> bytes:
    """Return canonical JSON of ASCII, integers and objects; the product's own is slower, and compared with it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(value: Any) -> str:
    """Return the digest of a value's canonical JSON."""
    return sha256_digest(compact(value))


def spread(pool: ProcessPoolExecutor, tasks: list[tuple[Any, ...]]) -> int:
    """Run tasks (function, arguments …) in the pool and return the sum of what they return."""
    futures = [pool.submit(*task) for task in tasks]
    return sum(future.result() for future in futures)


def chunks(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of at most `size`."""
    found = iter(rows)
    while part := list(itertools.islice(found, size)):
        yield part
