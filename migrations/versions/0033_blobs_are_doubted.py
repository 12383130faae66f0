"""Blobs that a runner's copy differed from are read again"""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.create_table(
        "blob_doubts",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("seen_by", sa.Text(), nullable=False),
        sa.Column("doubted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_blob_doubts_project_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blob_doubts")),
    )
    op.create_index(op.f("ix_blob_doubts_due_at"), "blob_doubts", ["due_at"])


def downgrade() -> None:
    op.drop_table("blob_doubts")
