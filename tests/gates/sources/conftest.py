import os

import pytest

from gates.plain import NO_AUTHORITY
from gates.sources.connection import Patience
from gates.sources.fetch import Bounds, fetch
from gates.sources.hosts import Hosts
from gates.sources.hub import HubSource
from gates.sources.store import FetchStore
from gates.sources.web import Web
from tests.support.hub import Hub, Repository

WEIGHTS = os.urandom(300_000)
QUICK = Bounds(pauses=(0.01, 0.01))


class Fetching:
    """A hub, a store, and what fetches from the one into the other."""

    def __init__(self, hub, root):
        self.hub, self.root, self.store = hub, root, FetchStore(root)

    def run(self, asked="hf:org/base", *, bounds=QUICK, patience=None, hosts=None, progress=None, keep=None):
        hosts = hosts or Hosts(named=[self.hub.url(), self.hub.url("cdn")])
        tokens = {self.hub.url(): self.hub.token} if self.hub.token else {}
        with Web(hosts, tokens=tokens, tls=NO_AUTHORITY) as web:
            source = HubSource(asked, web, self.hub.url())
            resolved = source.resolve()
            items = [item for item in source.list(resolved) if keep is None or item.path in keep]
        # Little patience is for the bytes alone: a busy machine may be slow to list.
        with Web(hosts, tokens=tokens, patience=patience or Patience(), tls=NO_AUTHORITY) as web:
            source = HubSource(asked, web, self.hub.url())
            found = fetch(source, resolved, items, self.store, bounds=bounds, progress=progress)
            return resolved, {one.item.path: one for one in found}

    def files(self):
        """What lies in the store, but for the states that it notes of its files."""
        files = (path.relative_to(self.root) for path in self.root.rglob("*") if not path.is_dir())
        return sorted(path.as_posix() for path in files if path.parts[0] != "states")


@pytest.fixture
def fetching(tmp_path):
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}
    with Hub({"org/base": Repository(files, {"model.safetensors"})}) as hub:
        yield Fetching(hub, tmp_path / "store")
