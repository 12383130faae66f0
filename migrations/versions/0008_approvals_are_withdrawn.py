"""An approval that is withdrawn is evidence of its own kind"""

from alembic import op

revision = "0008"
down_revision = "0011"

CHANGE = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind ' || replace(known, '{before}', '{after}');
END
$$
"""
# Whatever kinds the migrations before know: one is added to them.
FORMER, NEW = "''approval_granted''::text", "''approval_granted''::text, ''approval_withdrawn''::text"


def upgrade() -> None:
    op.execute(CHANGE.format(before=FORMER, after=NEW))


def downgrade() -> None:
    op.execute(CHANGE.format(before=NEW, after=FORMER))
