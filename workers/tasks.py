"""The control workers' tasks: three-line shells over `workers.control` and `workers.reconcile`."""

from uuid import UUID

from registry import housekeeping
from workers.app import app, control
from workers.reconcile import reconcile as take_on
from workers.sweep import sweep as look_around


@app.task(name="workers.tasks.sweep")
def sweep() -> None:
    """Find what is due and hand it out."""
    look_around(control(), lambda release: reconcile.delay(str(release)))


@app.task(name="workers.tasks.reconcile")
def reconcile(release: str) -> None:
    """Take a release one step on."""
    take_on(control(), UUID(release))


@app.task(name="workers.tasks.tidy")
def tidy() -> None:
    """Take away what has ended or is too old to be kept."""
    housekeeping.tidy(control().service)
