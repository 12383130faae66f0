"""Labels of bundles, by which they are found again"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("documents", sa.Column("labels", postgresql.JSONB(), nullable=True))
    op.create_table(
        "project_labels",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "digest"],
            ["project_documents.project_id", "project_documents.digest"],
            name=op.f("fk_project_labels_project_id"),
        ),
        sa.PrimaryKeyConstraint("project_id", "digest", "name", name=op.f("pk_project_labels")),
    )
    op.create_index(
        op.f("ix_project_labels_project_id_name_value_id"), "project_labels", ["project_id", "name", "value", "id"]
    )


def downgrade() -> None:
    op.drop_table("project_labels")
    op.drop_column("documents", "labels")
