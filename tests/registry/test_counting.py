"""What a project holds is counted beside others, and alone where one more could reach a limit."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from registry import db, quotas
from registry.quotas import NEAR, Added
from registry.tables import ProjectRow
from schemas.problems import QuotaExceeded, Unavailable

PATIENCE = 20.0
ONE = Added(documents=1)


def held(service, project):
    with service.database.transaction() as session:
        row = session.get_one(ProjectRow, project)
        shown = quotas.shown(session, service.settings, row)
        return shown.bytes, shown.documents


def limit(service, project, **limits):
    with service.database.transaction() as session:
        for name, most in limits.items():
            setattr(session.get_one(ProjectRow, project), name, most)


def add(service, project, added=ONE):
    with service.database.transaction() as session:
        quotas.count(session, service.settings, project, added)


def fill(service, project, documents):
    with service.database.transaction() as session:
        quotas.count(session, service.settings, project, Added(documents=documents), is_bound=False)


def waits_for_a_lock(service):
    with service.database.look() as connection:
        asked = text(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return connection.scalar(asked) > 0


def until(condition):
    ended = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        ended.wait(0.02)
    raise AssertionError("it did not come to it")


@pytest.mark.parametrize("most", [0, None, 5 * NEAR])
def test_far_from_a_limit_nobody_waits_for_anybody(committed, actor, most):
    project = actor.project_id
    limit(committed, project, max_documents=most)
    with committed.database.transaction() as slow:
        quotas.count(slow, committed.settings, project, ONE)
        # Were it counted in one row, this would wait until the slow one ends, which it does after this.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(add, committed, project).result(PATIENCE / 4)
        assert held(committed, project) == (0, 1)
    assert held(committed, project) == (0, 2)


def test_near_a_limit_whoever_is_second_waits_and_sees_what_the_first_added(committed, actor):
    project = actor.project_id
    limit(committed, project, max_documents=2)
    add(committed, project)
    with ThreadPoolExecutor(1) as pool:
        with committed.database.transaction() as first:
            quotas.count(first, committed.settings, project, ONE)
            second = pool.submit(add, committed, project)
            until(lambda: waits_for_a_lock(committed))
        with pytest.raises(QuotaExceeded, match="holds 2 documents of at most 2"):
            second.result(PATIENCE)
    assert held(committed, project) == (0, 2)


def test_bytes_of_a_project_with_a_limit_are_counted_alone(committed, actor):
    project = actor.project_id
    limit(committed, project, max_bytes=10 * NEAR)
    with ThreadPoolExecutor(1) as pool:
        with committed.database.transaction() as first:
            quotas.count(first, committed.settings, project, Added(bytes=6 * NEAR))
            second = pool.submit(add, committed, project, Added(bytes=6 * NEAR))
            until(lambda: waits_for_a_lock(committed))
        with pytest.raises(QuotaExceeded, match="holds 6000 bytes of at most 10000"):
            second.result(PATIENCE)
    assert held(committed, project) == (6 * NEAR, 0)


def test_what_was_added_while_somebody_waited_to_count_beside_others_is_not_exceeded(committed, actor):
    """Who looked when there was much room, and waited until there was none, is told to try again."""
    project = actor.project_id
    limit(committed, project, max_documents=2 * NEAR)
    with ThreadPoolExecutor(1) as pool:
        with committed.database.transaction() as alone:
            alone.execute(
                text("SELECT pg_advisory_xact_lock(hashtextextended(:lock, 0))"), {"lock": f"quota/{project}"}
            )
            late = pool.submit(add, committed, project)
            until(lambda: waits_for_a_lock(committed))
            quotas.count(alone, committed.settings, project, Added(documents=2 * NEAR), is_bound=False)
        with pytest.raises(Unavailable, match="try again"):
            late.result(PATIENCE)
    assert held(committed, project) == (0, 2 * NEAR)
    with pytest.raises(QuotaExceeded):
        add(committed, project)


def test_a_limit_is_kept_by_many_at_once_from_any_distance(committed, actor):
    project = actor.project_id
    limit(committed, project, max_documents=2 * NEAR)
    fill(committed, project, 2 * NEAR - 5)

    def one(_):
        try:
            add(committed, project)
        except QuotaExceeded:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(16))) == 5
    assert held(committed, project) == (0, 2 * NEAR)


def test_what_is_given_back_counts_whoever_gives_it_back(committed, actor):
    project = actor.project_id
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: add(committed, project, Added(bytes=5, documents=1)), range(8)))
        list(pool.map(lambda _: fill(committed, project, -1), range(8)))
    assert held(committed, project) == (40, 0)
    with committed.database.look() as connection:
        parts = db.ask(connection, db.Sql("SELECT documents FROM project_usage WHERE project_id = :p"), {"p": project})
    assert sum(part.documents for part in parts) == 0


def test_projects_do_not_wait_for_each_other(committed, actor):
    limit(committed, actor.project_id, max_documents=1)
    with committed.database.transaction() as session:
        other = ProjectRow(id=actor.project_id.__class__(int=7), name="other", created_at=db.now(session))
        session.add(other)
    with committed.database.transaction() as slow:
        quotas.count(slow, committed.settings, actor.project_id, ONE)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(add, committed, other.id).result(PATIENCE / 4)
