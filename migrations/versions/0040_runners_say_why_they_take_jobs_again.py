"""Runners keep who let them take jobs again, and why"""

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    op.add_column("runners", sa.Column("undrained_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("runners", sa.Column("undrained_by", sa.Text(), nullable=True))
    op.add_column("runners", sa.Column("undrain_reason", sa.Text(), nullable=True))


def downgrade() -> None:
    for column in ("undrain_reason", "undrained_by", "undrained_at"):
        op.drop_column("runners", column)
