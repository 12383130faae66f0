"""A live replica may have another beside it that takes its place, when its runner drains"""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"

OPEN = "kind = 'serve' AND state IN ('pending', 'claimed')"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("replaces", sa.Uuid(), nullable=True))
    op.drop_index("uq_jobs_serve", table_name="jobs")
    op.create_index(
        "uq_jobs_serve",
        "jobs",
        ["target_id", "bundle"],
        unique=True,
        postgresql_where=sa.text(f"{OPEN} AND replaces IS NULL"),
    )
    op.create_index("uq_jobs_replaces", "jobs", ["replaces"], unique=True, postgresql_where=sa.text(OPEN))


def downgrade() -> None:
    op.drop_index("uq_jobs_replaces", table_name="jobs")
    op.drop_index("uq_jobs_serve", table_name="jobs")
    op.create_index("uq_jobs_serve", "jobs", ["target_id", "bundle"], unique=True, postgresql_where=sa.text(OPEN))
    op.drop_column("jobs", "replaces")
