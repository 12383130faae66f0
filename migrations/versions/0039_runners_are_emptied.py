"""A runner that drains may have to be empty at some time, and its drains are entries"""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"

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
NEWER = "''alias_protected''::text, ''runner_drained''::text, ''runner_undrained''::text"


def upgrade() -> None:
    op.add_column("runners", sa.Column("empty_at", sa.DateTime(timezone=True), nullable=True))
    op.execute(KINDS.format(before=FORMER, after=NEWER))


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_column("runners", "empty_at")
