"""A pattern that protects aliases is of a generation, which whoever changes it may name"""

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"

# The place of the entry that set it: one transaction sets one pattern.
FILL = """
UPDATE alias_patterns SET generation = coalesce((
    SELECT max(position) FROM entries
    WHERE stream = 'alias-patterns/' || alias_patterns.project_id AND recorded_at = alias_patterns.set_at
), 0)
"""


def upgrade() -> None:
    op.add_column("alias_patterns", sa.Column("generation", sa.Integer(), nullable=True))
    op.execute(FILL)
    op.alter_column("alias_patterns", "generation", nullable=False)


def downgrade() -> None:
    op.drop_column("alias_patterns", "generation")
