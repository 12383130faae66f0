from collections.abc import Iterator

import pytest

from tests.support.real_engines import ENGINES, Booted, booted, chain_bundle


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    """CHAIN on each engine that runs for real; one boot each for all tests."""
    place = tmp_path_factory.mktemp(request.param)
    bundle = chain_bundle(request.param, place / "bundle")
    with booted(bundle, place / "bundle", place / "run") as running:
        yield running
