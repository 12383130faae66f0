"""Aliases are protected by pattern"""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"

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
FORMER = "''alias_protected''::text"
NEWER = "''alias_protected''::text, ''alias_pattern_set''::text, ''alias_pattern_removed''::text"


def upgrade() -> None:
    op.create_table(
        "alias_patterns",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("pattern", sa.Text(), nullable=False),
        sa.Column("movers", sa.Text(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("set_by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_alias_patterns_project_id")),
        sa.PrimaryKeyConstraint("project_id", "pattern", name=op.f("pk_alias_patterns")),
    )
    op.execute(KINDS.format(before=FORMER, after=NEWER))


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_table("alias_patterns")
