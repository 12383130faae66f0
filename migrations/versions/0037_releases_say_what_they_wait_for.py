"""A release in its canary says what its present step waits for"""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    op.add_column("releases", sa.Column("progress", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("releases", "progress")
