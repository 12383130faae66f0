"""Jobs keep on which runner they failed, and runners what their driver calls their accelerators"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    op.add_column("runners", sa.Column("device_ids", postgresql.JSONB(), nullable=True))
    op.add_column("jobs", sa.Column("avoids", sa.Uuid(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "avoids")
    op.drop_column("runners", "device_ids")
