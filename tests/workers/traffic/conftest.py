import contextlib

import pytest

from tests.support.gateway import running_gateway
from tests.support.streams import stream_engine


@pytest.fixture
def running(tmp_path):
    with running_gateway(tmp_path / "gateway") as found:
        yield found


@pytest.fixture
def engines():
    """A function that starts a scripted engine; all are stopped at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda name, script=None: stack.enter_context(stream_engine(name, script))


@pytest.fixture
def stable(engines):
    return engines("stable")


@pytest.fixture
def candidate(engines):
    return engines("candidate")
