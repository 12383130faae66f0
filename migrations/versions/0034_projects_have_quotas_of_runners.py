"""Projects have a limit of jobs held at once and of a day's runner time, and jobs say what they took"""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.add_column("projects", sa.Column("max_jobs", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("max_runner_seconds", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("spent_ms", sa.BigInteger(), nullable=True))
    op.create_index(
        "ix_jobs_measured", "jobs", ["project_id", "claimed_at"], postgresql_where=sa.text("kind <> 'serve'")
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_measured", table_name="jobs")
    op.drop_column("jobs", "spent_ms")
    op.drop_column("projects", "max_runner_seconds")
    op.drop_column("projects", "max_jobs")
