"""Movable names of bundles"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"

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
# Whatever kinds the migrations before know: three are added to them.
FORMER = "''quarantine_lifted''::text"
NEWER = "''quarantine_lifted''::text, ''alias_set''::text, ''alias_deleted''::text, ''alias_protected''::text"


def upgrade() -> None:
    op.create_table(
        "aliases",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("bundle", sa.Text(), nullable=True),
        sa.Column("is_protected", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "bundle"],
            ["project_documents.project_id", "project_documents.digest"],
            name=op.f("fk_aliases_bundle"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_aliases_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_aliases")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_aliases_project_id_name")),
    )
    op.create_index(op.f("ix_aliases_project_id_id"), "aliases", ["project_id", "id"])
    op.create_index(op.f("ix_aliases_project_id_bundle_id"), "aliases", ["project_id", "bundle", "id"])
    op.execute(KINDS.format(before=FORMER, after=NEWER))


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_table("aliases")
