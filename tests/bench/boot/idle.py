"""Many releases that wait, many more that have ended, and what runners did for them."""

from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.bench.registry.stage import Stage

BUNDLES = 100
COLUMNS = """
    (id, project_id, kind, release_id, target_id, bundle, policy, suites, "references", gates, runner_class, needs,
     queue, devices, claimed_at, state, is_wanted, attempt, due_at, fencing_token, lease_until, created_at, created_by,
     finished_at)
"""
EVALUATED = f"""
INSERT INTO jobs {COLUMNS}
SELECT gen_random_uuid(), project_id, 'evaluate', id, NULL, bundle, policy, '[]', '{{}}', '["integrity"]', 'cpu', NULL,
    'target/' || target_id, '[]', created_at, 'done', true, 1, created_at, 1, NULL, created_at, 'controller', created_at
FROM releases
"""
SERVED = f"""
INSERT INTO jobs {COLUMNS}
SELECT gen_random_uuid(), project_id, 'serve', id, target_id, bundle, policy, '[]', '{{}}', '[]', 'cpu', NULL,
    'target/' || target_id, '[]', created_at, CASE phase WHEN 'gated' THEN 'claimed' ELSE 'cancelled' END,
    phase = 'gated', 1, created_at, 1, CASE phase WHEN 'gated' THEN now() + interval '1 day' END, created_at,
    'controller', CASE phase WHEN 'gated' THEN NULL ELSE created_at END
FROM releases
"""
"""What waits has a replica too, of which somebody else renews the lease: what is live is idle as well."""


def add_jobs(session: Session) -> None:
    """Give each release an evaluation that is done, and a replica: live for what waits, ended for the others."""
    for statement in (EVALUATED, SERVED):
        session.execute(text(statement))


def filled(stage: Stage, idle: int, ended: int) -> str:
    """Fill the stage. Returns what is there, in one line."""
    stage.fill(BUNDLES, entries=stage.entries_of(ended, BUNDLES))
    with stage.service.database.transaction() as session:
        add_jobs(session)
        phases = dict(session.execute(text("SELECT phase, count(*) FROM releases GROUP BY phase")).tuples().all())
        jobs = session.scalar(text("SELECT count(*) FROM jobs"))
    with stage.service.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE jobs"))
    waiting, over = phases.get("gated", 0), phases.get("superseded", 0)
    if waiting < idle or over < ended:
        raise RuntimeError(f"{waiting} releases wait and {over} have ended; asked for were {idle} and {ended}")
    return f"{waiting:,} releases wait, {over:,} have ended, {jobs:,} jobs"
