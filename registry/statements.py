"""What `registry.documents` asks the database, in as few statements as it takes."""

from functools import lru_cache

from registry.db import Sql

HOLD = Sql(
    "WITH held AS MATERIALIZED"
    " (SELECT quarantined_at FROM project_documents WHERE project_id = :project AND digest = :digest FOR KEY SHARE)"
    " SELECT EXISTS (SELECT FROM held) AS is_there, clock_timestamp() AS at,"
    " EXISTS (SELECT FROM held WHERE quarantined_at IS NOT NULL) AS is_quarantined"
)
NAMES = Sql(
    "SELECT digest, name FROM project_documents WHERE project_id = :project AND digest = ANY(CAST(:digests AS text[]))"
)
IS_THERE = Sql(
    "SELECT deleted_at IS NOT NULL AS is_deleted FROM project_documents"
    " WHERE project_id = :project AND kind = :kind AND digest = :digest"
)
_COLUMNS = (
    "member.digest, member.name, stored.schema_id, member.created_at, member.created_by, stored.serving_digest,"
    " stored.components, stored.labels, member.quarantined_at IS NOT NULL AS is_quarantined"
)
FIND = Sql(
    f"SELECT member.id, {_COLUMNS}, member.locks, stored.body FROM project_documents AS member"  # noqa: S608 - names from above
    " JOIN documents AS stored ON stored.digest = member.digest"
    " WHERE member.project_id = :project AND member.kind = :kind AND member.digest = :digest"
    " AND member.deleted_at IS NULL"
)
# One statement stores a document, its membership, the blobs of a bundle and what it is found by. Who was first, or
# deleted it before, is told by the identity that comes back. The database locks each blob against whoever clears up.
# It tells too what the document's first entry needs, as `registry.appending.HERE` does, and which blobs are damaged by
# now: what marks one waits for the locks that were taken before this statement began to look. The clock is read first:
# whoever waits here for another's registration signs as of before, when the key was what this statement sees.
STORE = Sql(
    """
    WITH stored AS (
        INSERT INTO documents (digest, kind, schema_id, body, serving_digest, components, labels)
        VALUES (:digest, :kind, :schema, :body, :serving, CAST(:components AS jsonb), CAST(:labels AS jsonb))
        ON CONFLICT (digest) DO NOTHING
    ), member AS (
        INSERT INTO project_documents (project_id, digest, id, kind, name, created_at, created_by, locks)
        VALUES (:project, :digest, :identity, :kind, :name, :at, :by, CAST(:locks AS jsonb))
        ON CONFLICT (project_id, digest) DO UPDATE SET deleted_at = NULL, locks = excluded.locks,
            created_at = excluded.created_at, created_by = excluded.created_by
        WHERE project_documents.deleted_at IS NOT NULL
        RETURNING id
    ), made_of AS (
        INSERT INTO bundle_blobs (project_id, bundle, blob)
        SELECT :project, :digest, blob FROM unnest(CAST(:files AS text[])) AS blob, member
    ), marked AS (
        INSERT INTO project_labels (project_id, digest, id, name, value)
        SELECT :project, :digest, member.id, label, value
        FROM unnest(CAST(:label_names AS text[]), CAST(:label_values AS text[])) AS one (label, value), member
        WHERE member.id = :identity
    )
    SELECT greatest(clock_timestamp(), key.valid_from) AS at, (SELECT id FROM member) AS id,
        CAST(pg_current_xact_id() AS text) AS own, key.key_id, key.valid_until,
        ARRAY(SELECT digest FROM blobs WHERE digest = ANY(CAST(:files AS text[])) AND damaged_at IS NOT NULL) AS damaged
    FROM (VALUES (1)) AS one LEFT JOIN signing_keys AS key ON key.key_id = :key
    """
)


def _made_of(table: str) -> str:
    return (
        f"EXISTS (SELECT 1 FROM bundle_blobs AS made WHERE made.project_id = :project AND made.bundle = {table}.digest"  # noqa: S608 - a name of ours
        " AND made.blob = :file)"
    )


@lru_cache(maxsize=256)
def page(labels: int, names: int, *, quarantined: bool | None, is_after: bool, of_file: bool = False) -> Sql:
    """Return the query of one page of documents, with so many labels and names asked for.

    `quarantined`: only those that are, or only the others, or all; `is_after`: only what comes after a cursor;
    `of_file`: only bundles that are made of one file.

    Each label's marks lie in the order of the list, and the page is cut by them alone. Were the bundles joined before
    that, the planner would take the few that it expects for all that there are, read every bundle, and sort.
    """
    named = f"IN ({', '.join(f':named{place}' for place in range(names))})"
    of = "WHERE member.project_id = :project AND member.kind = :kind AND member.deleted_at IS NULL"
    held = f"quarantined_at IS {'NOT ' if quarantined else ''}NULL"
    joined = ""
    if labels:
        asked = range(labels)
        marks = ", ".join(f"project_labels AS mark{place}" for place in asked)
        wanted = [
            f"mark{place}.project_id = :project AND mark{place}.name = :label{place} AND mark{place}.value = :is{place}"
            for place in asked
        ]
        wanted += [f"mark{place}.id = mark0.id" for place in asked[1:]]
        if names or quarantined is not None or of_file:
            marks += ", project_documents AS bundle"
            wanted.append("bundle.id = mark0.id")
        if names:
            wanted.append(f"bundle.name {named}")
        if quarantined is not None:
            wanted.append(f"bundle.{held}")
        if of_file:
            wanted.append(_made_of("bundle"))
        if is_after:
            wanted.append("mark0.id < :after")
        joined = (
            f" JOIN (SELECT mark0.id FROM {marks} WHERE {' AND '.join(wanted)} ORDER BY mark0.id DESC LIMIT :limit)"  # noqa: S608 - of numbers alone
            " AS page ON page.id = member.id"
        )
    else:
        of += f" AND member.name {named}" if names else ""
        of += f" AND member.{held}" if quarantined is not None else ""
        of += f" AND {_made_of('member')}" if of_file else ""
    if is_after:
        of += " AND member.id < :after"
    return Sql(
        f"SELECT member.id, {_COLUMNS} FROM project_documents AS member"  # noqa: S608 - of numbers alone
        f" JOIN documents AS stored ON stored.digest = member.digest{joined} {of}"
        " ORDER BY member.id DESC LIMIT :limit"
    )
