"""What `registry.evidence` asks the database when it puts an entry into its place."""

from registry.db import Sql

# The transaction gets its number before it waits, and before the entry gets its sequence: see `registry.cursors`.
HOLD = Sql("SELECT pg_advisory_xact_lock(hashtextextended(:stream, 0)), CAST(pg_current_xact_id() AS text)")
# A statement of its own: what it sees was committed before the stream was held. Nothing is recorded before its key
# began to sign, also where the clock was set back to before that: it would count as signed by somebody else for ever.
END = Sql(
    """
    SELECT
        (SELECT sequence FROM entries WHERE stream = :stream AND act = :act),
        last.position, last.entry_digest, CAST(last.transaction_id AS text),
        greatest(clock_timestamp(), key.valid_from), key.key_id, key.valid_until
    FROM (VALUES (1)) AS one
    LEFT JOIN LATERAL (
        SELECT position, entry_digest, transaction_id FROM entries
        WHERE stream = :stream ORDER BY position DESC LIMIT 1
    ) AS last ON true
    LEFT JOIN signing_keys AS key ON key.key_id = :key
    """
)


# Where the stream is held already, and what is in it is known.
HERE = Sql(
    """
    SELECT CAST(pg_current_xact_id() AS text), greatest(clock_timestamp(), key.valid_from), key.key_id, key.valid_until
    FROM (VALUES (1)) AS one LEFT JOIN signing_keys AS key ON key.key_id = :key
    """
)

_READ = (
    "sequence, id, project_id, stream, position, act, kind, actor, recorded_at, envelope, previous, entry_digest,"
    " key_id, CAST(CAST(transaction_id AS text) AS bigint) AS transaction_id"
)
# As `registry.logged.Logged`. The log of a release is read whole by most acts on it.
LOG = Sql(
    f"SELECT {_READ} FROM entries WHERE stream = :stream AND position > :after ORDER BY position LIMIT :limit"  # noqa: S608 - names from above
)

WRITTEN = (
    "id", "project_id", "stream", "position", "act", "kind", "actor", "recorded_at", "envelope", "previous",
    "entry_digest", "key_id", "transaction_id",
)  # fmt: skip
INSERT = Sql(
    f"INSERT INTO entries ({', '.join(WRITTEN)}) VALUES ({', '.join(f':{name}' for name in WRITTEN[:-1])},"  # noqa: S608 - names from above
    " CAST(CAST(:transaction_id AS text) AS xid8)) RETURNING sequence"
)
FOLDED = ("phase", "phase_since", "is_paused", "reason", "step", "step_since", "weight_bp")
# A release moves with its entry, and what its target serves, or is about to, is told by the phases of its releases. How
# far it was before, as its progress says, is no news any more.
RECORD = Sql(
    f"""
    WITH moved AS (
        UPDATE releases SET {", ".join(f"{name} = :new_{name}" for name in FOLDED)},
            held = CAST(:new_held AS jsonb), entries = :position, due_at = :recorded_at, progress = NULL
        WHERE id = :release
    ), changed AS (
        UPDATE targets SET generation = generation + 1 WHERE id = :target AND :is_moved
    )
    {INSERT.text}
    """  # noqa: S608 - names from above
)
CHANGED = Sql("UPDATE targets SET generation = generation + 1 WHERE id = :target")
