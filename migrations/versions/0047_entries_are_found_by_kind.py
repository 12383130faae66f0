"""Entries of a kind are found in the order of cursors"""

from alembic import op

revision = "0047"
down_revision = "0046"

COLUMNS = ["project_id", "kind", "transaction_id", "sequence"]


def upgrade() -> None:
    op.create_index("ix_entries_project_id_kind_transaction_id_sequence", "entries", COLUMNS)


def downgrade() -> None:
    op.drop_index("ix_entries_project_id_kind_transaction_id_sequence", "entries")
