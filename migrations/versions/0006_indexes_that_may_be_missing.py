"""What a bundle is released as, and which leases ran out, are found without reading every release"""

from alembic import op

revision = "0006"
down_revision = "0004"


def upgrade() -> None:
    # An earlier migration came to make it: a database that had run that one before lacks the index.
    op.execute("CREATE INDEX IF NOT EXISTS ix_releases_bundle_id ON releases (bundle, id)")
    op.execute("CREATE INDEX ix_releases_leased ON releases (lease_until) WHERE lease_until IS NOT NULL")


def downgrade() -> None:
    # The other index belongs to the migration that makes it.
    op.execute("DROP INDEX ix_releases_leased")
