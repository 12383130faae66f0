"""Which blobs bundles are made of, raw records that may be erased, deleted bundles, and what projects may hold"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0014"

KINDS = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind ' || replace(known, '{before}', '{after}');
END
$$
"""
# Whatever kinds the migrations before know: two are added to them.
FORMER = "''bundle_registered''::text"
NEWER = "''bundle_registered''::text, ''bundle_deleted''::text, ''records_erased''::text"

FILES = """
INSERT INTO bundle_blobs (project_id, bundle, blob)
SELECT DISTINCT member.project_id, member.digest, file ->> 'sha256'
FROM project_documents member
JOIN documents ON documents.digest = member.digest
CROSS JOIN LATERAL jsonb_array_elements(convert_from(documents.body, 'UTF8')::jsonb -> 'files') file
JOIN project_blobs held ON held.project_id = member.project_id AND held.digest = file ->> 'sha256'
WHERE member.kind = 'bundle'
"""
# A result's body lies in the predicate, or one deeper where that is an in-toto test result.
RECORDS = """
INSERT INTO records (project_id, digest, recorded_at)
SELECT project_id, digest, min(recorded_at)
FROM (
    SELECT project_id, recorded_at, coalesce(
        predicate #>> '{body,records}', predicate #>> '{sluicegate,body,records}'
    ) AS digest
    FROM entries
    CROSS JOIN LATERAL (
        SELECT convert_from(
            decode(convert_from(envelope, 'UTF8')::jsonb ->> 'payload', 'base64'), 'UTF8'
        )::jsonb -> 'predicate' AS predicate
    ) statement
    WHERE kind = 'gate_recorded'
) result
WHERE digest IS NOT NULL
GROUP BY project_id, digest
"""
USAGE = """
INSERT INTO project_usage (project_id, bytes, documents)
SELECT id,
    (SELECT coalesce(sum(size), 0) FROM project_blobs JOIN blobs USING (digest) WHERE project_id = projects.id),
    (SELECT count(*) FROM project_documents WHERE project_id = projects.id)
FROM projects
"""


def upgrade() -> None:
    op.add_column("projects", sa.Column("max_bytes", sa.BigInteger(), nullable=True))
    op.add_column("projects", sa.Column("max_uploads", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("max_documents", sa.Integer(), nullable=True))
    op.create_table(
        "project_usage",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("documents", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_project_usage_project_id")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_project_usage")),
    )
    op.add_column("project_blobs", sa.Column("used_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE project_blobs SET used_at = created_at")
    op.alter_column("project_blobs", "used_at", nullable=False)
    op.create_index(op.f("ix_project_blobs_used_at"), "project_blobs", ["used_at"])
    op.create_index(op.f("ix_project_blobs_digest"), "project_blobs", ["digest"])
    op.create_table(
        "records",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_records_project_id")),
        sa.PrimaryKeyConstraint("project_id", "digest", name=op.f("pk_records")),
    )
    op.create_index("ix_records_kept", "records", ["recorded_at"], postgresql_where=sa.text("erased_at IS NULL"))
    op.add_column("project_documents", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "bundle_blobs",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("bundle", sa.Text(), nullable=False),
        sa.Column("blob", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "bundle"],
            ["project_documents.project_id", "project_documents.digest"],
            name=op.f("fk_bundle_blobs_bundle"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id", "blob"],
            ["project_blobs.project_id", "project_blobs.digest"],
            name=op.f("fk_bundle_blobs_blob"),
        ),
        sa.PrimaryKeyConstraint("project_id", "bundle", "blob", name=op.f("pk_bundle_blobs")),
    )
    op.create_index(op.f("ix_bundle_blobs_project_id_blob"), "bundle_blobs", ["project_id", "blob"])
    op.execute(KINDS.format(before=FORMER, after=NEWER))
    op.execute(FILES)
    op.execute(RECORDS)
    op.execute(USAGE)


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_table("bundle_blobs")
    op.drop_column("project_documents", "deleted_at")
    op.drop_table("records")
    op.drop_index(op.f("ix_project_blobs_digest"), "project_blobs")
    op.drop_index(op.f("ix_project_blobs_used_at"), "project_blobs")
    op.drop_column("project_blobs", "used_at")
    op.drop_table("project_usage")
    for name in ("max_bytes", "max_uploads", "max_documents"):
        op.drop_column("projects", name)
