"""A runner says which version of claims it understands"""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"


def upgrade() -> None:
    op.add_column("runners", sa.Column("speaks", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("runners", "speaks")
