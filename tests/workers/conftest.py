from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.service import Service
from tests.support.runners import Bench, bench


@pytest.fixture(name="bench")
def _bench(service: Service, tmp_path: Path) -> Iterator[Bench]:
    """A service with short leases, whose runners a test starts; nothing of theirs is left in the end."""
    with bench(service, tmp_path) as made:
        yield made
