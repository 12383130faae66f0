"""Projects are counted in parts, so that nobody who registers waits for somebody else's commit"""

import sqlalchemy as sa
from alembic import op

revision = "0042"
down_revision = "0041"


def upgrade() -> None:
    op.add_column("project_usage", sa.Column("part", sa.SmallInteger(), nullable=False, server_default="0"))
    op.alter_column("project_usage", "part", server_default=None)
    op.drop_constraint(op.f("pk_project_usage"), "project_usage", type_="primary")
    op.create_primary_key(op.f("pk_project_usage"), "project_usage", ["project_id", "part"])


def downgrade() -> None:
    op.execute(
        """
        INSERT INTO project_usage (project_id, part, bytes, documents)
        SELECT project_id, -1, sum(bytes), sum(documents) FROM project_usage GROUP BY project_id
        """
    )
    op.execute("DELETE FROM project_usage WHERE part <> -1")
    op.drop_constraint(op.f("pk_project_usage"), "project_usage", type_="primary")
    op.create_primary_key(op.f("pk_project_usage"), "project_usage", ["project_id"])
    op.drop_column("project_usage", "part")
