"""C134: deleting what something still needs is refused, and clearing up takes nothing that is needed."""

import pytest

from registry import collection, deletion
from schemas.api import Act
from schemas.common import sha256_digest
from schemas.problems import Conflict
from tests.support.factories import created_target
from tests.support.holdings import SHARED, age, held, live, register, sent, there, weights
from tests.support.together import together


def delete(service, actor, bundle):
    with service.database.transaction() as session:
        return deletion.delete_bundle(session, service, actor, bundle.digest, Act(reason="clearing up"))


def test_c134_what_is_live_rolled_back_to_or_a_base_stays_and_the_unused_goes_without_its_shared_blob(service, actor):
    b, a, c = (held(service, actor, name) for name in "bac")
    created_target(service, actor)
    before = live(service, actor, b)
    now = live(service, actor, a, over=before)
    base = held(service, actor, "base")
    d = held(service, actor, "d", adapter_base=base.components()["weights"])

    for bundle, holder, why in (
        (a, str(now), "live on chat@prod"),
        (b, str(before), "rollback target"),
        (base, d.digest, "base of an adapter of bundle d"),
    ):
        with pytest.raises(Conflict, match=why) as refused:
            delete(service, actor, bundle)
        assert refused.value.members["holder"] == holder
        assert [one["holder"] for one in refused.value.members["users"]] == [holder]

    gone = delete(service, actor, c)
    assert (gone.blobs, gone.bytes) == (1, len(weights("c")))
    age(service, days=2)
    found = collection.collect(service, is_dry_run=False)
    assert (found.blobs, found.missing) == (1, [])
    assert there(service, weights("c"), SHARED, *(weights(name) for name in ("a", "b", "d", "d adapter", "base"))) == [
        False,
        *[True] * 6,
    ]
    # With what needed it gone, the base may go too.
    delete(service, actor, d)
    delete(service, actor, base)


def test_c134_clearing_up_while_a_bundle_is_registered_takes_no_blob_of_it(service, actor):
    """Its blobs seem to be over: either it is registered with all of them, or it is told that they are missing."""
    for round_ in range(6):
        bundle = sent(service, actor, f"d{round_}")
        age(service, days=2)
        registered, _ = together(
            lambda b=bundle: register(service, actor, b), lambda: collection.collect(service, is_dry_run=False)
        )
        if registered is True:
            age(service, days=2)
            collection.collect(service, is_dry_run=False)
            assert there(service, SHARED, weights(f"d{round_}")) == [True, True]
            delete(service, actor, bundle)
        else:
            assert type(registered).__name__ == "BlobsMissing"


def test_c134_blobs_of_a_registration_that_is_not_finished_are_kept(service, actor):
    bundle = sent(service, actor, "d")
    assert collection.collect(service, is_dry_run=False).blobs == 0
    assert register(service, actor, bundle)


def test_c134_a_blob_removed_by_hand_is_named_and_stops_nothing(service, actor):
    lost, c = held(service, actor, "lost"), held(service, actor, "c")
    service.blobs.path(sha256_digest(weights("lost"))).unlink()
    delete(service, actor, c)
    age(service, days=2)
    found = collection.collect(service, is_dry_run=False)
    assert (found.missing, found.missing_count) == ([sha256_digest(weights("lost"))], 1)
    assert there(service, weights("c"), SHARED) == [False, True]
    # What is lost may be deleted and cleared up like everything else.
    delete(service, actor, lost)
    age(service, days=2)
    assert collection.collect(service, is_dry_run=False).missing == []
