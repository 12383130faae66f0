"""More roles, tokens for some targets, revocation as evidence, and answers that are given again"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0005"

ROLES = "role IN ('viewer', 'ci', 'engineer', 'manager', 'auditor', 'admin', 'runner')"
FORMER_ROLES = "role IN ('engineer', 'manager', 'admin', 'runner')"

# Whatever kinds the migrations before know: one is added to them.
ADD_KIND = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind '
        || replace(known, '''token_created''::text', '''token_created''::text, ''token_revoked''::text');
END
$$
"""
REMOVE_KIND = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind ' || replace(known, ', ''token_revoked''::text', '');
END
$$
"""


def upgrade() -> None:
    op.add_column("tokens", sa.Column("targets", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.drop_constraint("ck_tokens_role", "tokens")
    op.create_check_constraint(op.f("ck_tokens_role"), "tokens", ROLES)
    op.create_index("ix_tokens_project_id_id", "tokens", ["project_id", "id"])
    op.execute(ADD_KIND)
    op.create_table(
        "answers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_answers")),
    )
    op.create_index("ix_answers_expires_at", "answers", ["expires_at"])


def downgrade() -> None:
    op.drop_table("answers")
    op.execute(REMOVE_KIND)
    op.drop_index("ix_tokens_project_id_id", "tokens")
    op.drop_constraint("ck_tokens_role", "tokens")
    op.create_check_constraint(op.f("ck_tokens_role"), "tokens", FORMER_ROLES)
    op.drop_column("tokens", "targets")
