"""Runners are drained and say how much disk is free, and gates make room for what is live"""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.add_column("runners", sa.Column("drained_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("runners", sa.Column("drained_by", sa.Text(), nullable=True))
    op.add_column("runners", sa.Column("drain_reason", sa.Text(), nullable=True))
    op.add_column("runners", sa.Column("disk_free_bytes", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("preempted_for", sa.Uuid(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "preempted_for")
    for column in ("disk_free_bytes", "drain_reason", "drained_by", "drained_at"):
        op.drop_column("runners", column)
