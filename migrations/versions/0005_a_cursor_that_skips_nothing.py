"""A cursor over all entries that skips none, and a bell for who waits for them"""

from alembic import op

revision = "0005"
down_revision = "0001"

BELL = """
CREATE FUNCTION ring_for_entry() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('sluicegate_entries', NEW.transaction_id || ' ' || NEW.project_id || ' ' || NEW.stream);
    RETURN NULL;
END
$$;
CREATE TRIGGER entries_bell AFTER INSERT ON entries FOR EACH ROW EXECUTE FUNCTION ring_for_entry();
"""


def upgrade() -> None:
    # A constant default is stored once for all the rows that are there; they come first, in their sequence.
    op.execute("ALTER TABLE entries ADD COLUMN transaction_id xid8 NOT NULL DEFAULT '0'")
    op.execute("ALTER TABLE entries ALTER COLUMN transaction_id SET DEFAULT pg_current_xact_id()")
    op.execute(
        "CREATE INDEX ix_entries_project_id_transaction_id_sequence ON entries (project_id, transaction_id, sequence)"
    )
    op.drop_index("ix_entries_project_id_sequence", table_name="entries")
    op.execute(BELL)
    op.create_index("ix_releases_bundle_id", "releases", ["bundle", "id"])


def downgrade() -> None:
    op.drop_index("ix_releases_bundle_id", table_name="releases")
    op.execute("DROP TRIGGER entries_bell ON entries")
    op.execute("DROP FUNCTION ring_for_entry()")
    op.create_index("ix_entries_project_id_sequence", "entries", ["project_id", "sequence"])
    op.drop_index("ix_entries_project_id_transaction_id_sequence", table_name="entries")
    op.drop_column("entries", "transaction_id")
