from collections.abc import Iterator

import pytest

from tests.support.ground import Ground, ground


@pytest.fixture(scope="session", name="ground")
def _ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One stack for every kill: what one test breaks, the next one stands on."""
    with ground(tmp_path_factory.mktemp("ground")) as made:
        yield made
