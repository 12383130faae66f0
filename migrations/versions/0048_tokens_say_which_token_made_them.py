"""A token says by which token it was made; of older ones that is not known"""

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("made_by", sa.Uuid(), nullable=True))
    op.create_index("ix_tokens_made_by", "tokens", ["made_by"])


def downgrade() -> None:
    op.drop_index("ix_tokens_made_by", "tokens")
    op.drop_column("tokens", "made_by")
