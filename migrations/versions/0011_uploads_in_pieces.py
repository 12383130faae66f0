"""Uploads in pieces, which go on after a cut"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_uploads_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
        sa.UniqueConstraint("project_id", "digest", "size", name=op.f("uq_uploads_project_id_digest_size")),
    )
    op.create_index(op.f("ix_uploads_project_id_id"), "uploads", ["project_id", "id"])
    op.create_index(op.f("ix_uploads_touched_at"), "uploads", ["touched_at"])


def downgrade() -> None:
    op.drop_table("uploads")
