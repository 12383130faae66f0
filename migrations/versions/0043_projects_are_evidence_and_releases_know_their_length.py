"""Projects and the secrets of tokens are entries, and a release knows how long its log is"""

import sqlalchemy as sa
from alembic import op

revision = "0043"
down_revision = "0042"

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
FORMER = "''token_created''::text"
NEWER = "''token_created''::text, ''project_set''::text, ''token_found''::text"

LENGTHS = """
UPDATE releases SET entries = coalesce(
    (SELECT max(position) FROM entries AS entry WHERE entry.stream = 'release/' || releases.id), 0
)
"""


def upgrade() -> None:
    op.execute(KINDS.format(before=FORMER, after=NEWER))
    op.add_column("releases", sa.Column("entries", sa.Integer(), nullable=True))
    op.execute(LENGTHS)
    op.alter_column("releases", "entries", nullable=False)


def downgrade() -> None:
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(KINDS.format(before=NEWER, after=FORMER))
    op.drop_column("releases", "entries")
