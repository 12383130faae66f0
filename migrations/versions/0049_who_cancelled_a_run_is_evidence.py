"""Who cancelled a run that belongs to no release is an entry"""

from alembic import op

revision = "0049"
down_revision = "0048"

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
# Whatever kinds the migrations before know: one is added to them.
FORMER, NEWER = "''run_asked''::text", "''run_asked''::text, ''run_cancelled''::text"


def upgrade() -> None:
    op.execute(KINDS.format(before=FORMER, after=NEWER))


def downgrade() -> None:
    # Entries are append-only: with one of the newer kind among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
