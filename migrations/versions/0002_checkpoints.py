"""Checkpoints, and signing keys that end and never change"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0003"

# Whatever kinds the migrations before know: two are added to them.
CHANGE_KINDS = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind ' || replace(known, '{before}', '{after}');
END
$$
"""
FORMER = "''token_created''::text"
NEWER = "''token_created''::text, ''key_rotated''::text, ''evidence_revoked''::text"

APPEND_ONLY = """
CREATE TRIGGER checkpoints_append_only BEFORE UPDATE OR DELETE ON checkpoints
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER checkpoints_no_truncate BEFORE TRUNCATE ON checkpoints
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER signing_keys_append_only BEFORE DELETE ON signing_keys
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER signing_keys_only_end BEFORE UPDATE ON signing_keys
    FOR EACH ROW WHEN (
        OLD.valid_until IS NOT NULL OR NEW.valid_until IS NULL
        OR (OLD.key_id, OLD.algorithm, OLD.public_key_pem, OLD.valid_from)
            IS DISTINCT FROM (NEW.key_id, NEW.algorithm, NEW.public_key_pem, NEW.valid_from)
    ) EXECUTE FUNCTION refuse_change();
CREATE TRIGGER signing_keys_no_truncate BEFORE TRUNCATE ON signing_keys
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("streams", sa.BigInteger(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("made_by", sa.Text(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["signing_keys.key_id"], name=op.f("fk_checkpoints_key_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_checkpoints_project_id")),
        sa.PrimaryKeyConstraint("project_id", "number", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("digest", name=op.f("uq_checkpoints_digest")),
    )
    op.create_index(op.f("ix_entries_project_id_sequence"), "entries", ["project_id", "sequence"])
    op.execute(CHANGE_KINDS.format(before=FORMER, after=NEWER))
    op.execute(APPEND_ONLY)


def downgrade() -> None:
    for trigger in ("signing_keys_append_only", "signing_keys_only_end", "signing_keys_no_truncate"):
        op.execute(f"DROP TRIGGER {trigger} ON signing_keys")
    # Entries are append-only: with one of the newer kinds among them, this refuses.
    op.execute(CHANGE_KINDS.format(before=NEWER, after=FORMER))
    op.drop_index(op.f("ix_entries_project_id_sequence"), table_name="entries")
    op.drop_table("checkpoints")
