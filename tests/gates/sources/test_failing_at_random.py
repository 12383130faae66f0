"""Two hundred fetches from servers that fail at random: what is in the store is right, and nothing else stays."""

import hashlib
import os
import random
import time

from gates.sources.fetch import Bounds, fetch
from gates.sources.hosts import Hosts
from gates.sources.hub import HubSource
from gates.sources.source import SourceRefused, SourceUnavailable
from gates.sources.store import ABANDONED_SECONDS
from gates.sources.web import Web
from tests.gates.sources.conftest import Fetching
from tests.support.hub import Hub, Repository, answer

SIZES = {"a": 0, "b": 1, "c": 1_000, "d": 70_000, "e": 300_000}
FILES = {f"{name}.safetensors": os.urandom(size) for name, size in SIZES.items()}
FILES |= {"config.json": b'{"model_type": "llama"}', "sub/notes.json": b"[1]"}
FETCHES = 200


def lies(body, chance):
    """Ways to fail, each with the bytes that are sent."""
    half, tag = len(body) // 2, {"etag": f'"{chance.randrange(2)}"'}
    start = chance.choice([0, half, half + 1])
    ranged = {"content-range": f"bytes {start}-{max(0, len(body) - 1)}/{len(body)}"} | tag
    whole = answer(200, body, tag)
    return {
        "other bytes": answer(200, os.urandom(len(body)), tag),
        "half of other bytes": answer(200, body[:half] + os.urandom(len(body) - half), tag),
        "cut": whole[: len(whole) - chance.randrange(1, len(body) + 2)],
        "nothing": b"",
        "busy": answer(chance.choice([429, 503]), headers={"retry-after": "0"}),
        "a part": answer(206, body[half:], ranged),
        "no such part": answer(416),
        "one more": answer(200, body + b"x", tag),
        "one less": answer(200, body[:-1], tag),
        "a status": answer(chance.choice([204, 301, 304, 401, 403, 404, 410, 418])),
    }


def test_two_hundred_fetches_that_fail_leave_no_wrong_file_and_nothing_that_stays(tmp_path):
    chance = random.Random(23)
    told, seen = dict.fromkeys(lies(b"", chance), 0), set()

    def lie(request):
        if chance.random() < 0.4:
            return None
        name = next((one for one in FILES if request.path.endswith(one)), None)
        digests = {hashlib.sha256(body).hexdigest(): body for body in FILES.values()}
        body = FILES[name] if name else next((one for key, one in digests.items() if key in request.path), b"")
        kind, raw = chance.choice(sorted(lies(body, chance).items()))
        told[kind] += 1
        return raw

    right = {hashlib.sha256(body).hexdigest() for body in FILES.values()}
    with Hub({"org/base": Repository(FILES, {name for name in FILES if name.endswith("safetensors")})}) as hub:
        fetching = Fetching(hub, tmp_path / "store")
        with Web(Hosts(named=[hub.url(), hub.url("cdn")])) as web:
            source = HubSource("hf:org/base", web, hub.url())
            resolved = source.resolve()
            items = {item.path: item for item in source.list(resolved)}
            for _ in range(FETCHES):
                hub.lies = {"cdn": lie, "resolve": lie} if chance.random() < 0.3 else {"cdn": lie}
                wanted = chance.sample(sorted(FILES), chance.randrange(1, len(FILES)))
                asked = [items[path] for path in wanted]
                try:
                    found = fetch(source, resolved, asked, fetching.store, bounds=Bounds(pauses=(0.0,)))
                    seen |= {"fetched", *(one.place.read_bytes() == FILES[one.item.path] for one in found)}
                except (SourceRefused, SourceUnavailable) as problem:
                    seen |= {problem.code, problem.file in wanted}
                kept = [path for path in fetching.files() if path.startswith("sha256/")]
                assert all(hashlib.sha256((fetching.root / path).read_bytes()).hexdigest() in right for path in kept)
                if kept and chance.random() < 0.5:
                    (fetching.root / chance.choice(kept)).unlink()
        assert False not in seen
        assert min(told.values()) > 0
        assert {"fetched", "digest-mismatch", "size-mismatch", "connection-broken", "status-unexpected"} <= seen
        hub.lies = {}
        # What was cut may be gone on with. All else is gone at once, and that when nobody does for long.
        for path in (fetching.root / "parts").iterdir():
            os.utime(path, (1, time.time() - ABANDONED_SECONDS - 60))
        fetching.run(keep={"config.json"})
        assert [path for path in fetching.files() if not path.startswith(("sha256/", "names/"))] == []
        _, whole = fetching.run()
        assert {path: one.place.read_bytes() for path, one in whole.items()} == FILES
