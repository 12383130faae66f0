"""A runner says how many jobs it holds at once, so that one slot can be kept for a rollback"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("runners", sa.Column("slots", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("runners", "slots")
