"""Bundles are quarantined, until a person lifts it"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"

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
FORMER = "''bundle_deleted''::text"
NEWER = "''bundle_deleted''::text, ''bundle_quarantined''::text, ''quarantine_lifted''::text"


def upgrade() -> None:
    op.add_column("project_documents", sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "ix_project_documents_quarantined",
        "project_documents",
        ["project_id", "id"],
        postgresql_where=sa.text("quarantined_at IS NOT NULL"),
    )
    op.execute(KINDS.format(before=FORMER, after=NEWER))


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_index("ix_project_documents_quarantined", "project_documents")
    op.drop_column("project_documents", "quarantined_at")
