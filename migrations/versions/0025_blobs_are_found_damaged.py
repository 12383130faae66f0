"""A blob of the store is found to have other bytes, until the right ones are sent again"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("blobs", sa.Column("damaged_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("blobs", "damaged_at")
