"""The end of a run is evidence of its own kind, and the jobs of a bundle and of a runner are found by an index"""

from alembic import op

revision = "0012"
down_revision = "0008"

CHANGE = """
DO $$
DECLARE known text;
BEGIN
    SELECT pg_get_constraintdef(oid) INTO STRICT known FROM pg_constraint WHERE conname = 'ck_entries_kind';
    ALTER TABLE entries DROP CONSTRAINT ck_entries_kind;
    EXECUTE 'ALTER TABLE entries ADD CONSTRAINT ck_entries_kind ' || replace(known, '{before}', '{after}');
END
$$
"""
# Whatever kinds the migrations before know: one is added to them.
FORMER, NEW = "''attempt_errored''::text", "''attempt_errored''::text, ''run_ended''::text"


def upgrade() -> None:
    op.execute(CHANGE.format(before=FORMER, after=NEW))
    op.create_index(op.f("ix_jobs_bundle_id"), "jobs", ["bundle", "id"])
    op.create_index(op.f("ix_jobs_runner_id_id"), "jobs", ["runner_id", "id"])


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_runner_id_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_bundle_id"), table_name="jobs")
    op.execute(CHANGE.format(before=NEW, after=FORMER))
