"""That a project holds a blob is signed by the service"""

import sqlalchemy as sa
from alembic import op

revision = "0045"
down_revision = "0044"


def upgrade() -> None:
    op.add_column("project_blobs", sa.Column("proof", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("project_blobs", "proof")
