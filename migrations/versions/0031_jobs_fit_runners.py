"""A job says what it needs and for whom it is done, a runner what it has to start engines with"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("runners", sa.Column("environments", postgresql.JSONB(), nullable=True))
    op.add_column("runners", sa.Column("launcher", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("needs", postgresql.JSONB(), nullable=True))
    op.add_column("jobs", sa.Column("queue", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("devices", postgresql.JSONB(), nullable=True))
    op.add_column("jobs", sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index("ix_jobs_turns", "jobs", ["project_id", "runner_class", "queue", "claimed_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_turns", "jobs")
    for column in ("claimed_at", "devices", "queue", "needs"):
        op.drop_column("jobs", column)
    op.drop_column("runners", "launcher")
    op.drop_column("runners", "environments")
