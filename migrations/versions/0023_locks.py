"""How the sources of a bundle were resolved, beside its registration"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("project_documents", sa.Column("locks", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("project_documents", "locks")
