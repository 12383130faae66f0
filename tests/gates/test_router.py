"""Arms and splits refuse what no router may be told."""

import pytest

from gates.router import Arm, Split, cluster_name

BUNDLE = "sha256:" + "ab" * 32


def arm(name: str, weight_bp: int, port: int = 8001) -> Arm:
    return Arm(name, f"chat@prod/{'ab' * 6}/r{port}", f"127.0.0.1:{port}", weight_bp)


def test_a_cluster_is_named_by_target_bundle_and_replica():
    assert cluster_name("chat.v1@prod", BUNDLE, "r7") == "chat.v1@prod/abababababab/r7"


@pytest.mark.parametrize(
    ("target", "bundle", "replica"),
    [("chat", BUNDLE, "r"), ("chat@prod", "abab", "r"), ("chat@prod", BUNDLE, "../r"), ("Chat@prod", BUNDLE, "r")],
)
def test_a_malformed_part_has_no_cluster_name(target, bundle, replica):
    with pytest.raises(ValueError, match="not a"):
        cluster_name(target, bundle, replica)


def test_weights_sum_to_the_whole_or_there_are_no_arms():
    assert Split("chat@prod", 1).arms == ()
    Split("chat@prod", 1, (arm("stable", 9_500), arm("candidate", 500, 8002)))
    with pytest.raises(ValueError, match="sum to 9999"):
        Split("chat@prod", 1, (arm("stable", 9_499), arm("candidate", 500, 8002)))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "host:80", "127.0.0.1:80\n"])
def test_an_address_is_an_ip_and_a_port(address):
    with pytest.raises(ValueError, match="address"):
        Arm("stable", "c", address, 10_000)


def test_two_arms_never_share_a_name_a_cluster_or_an_address():
    with pytest.raises(ValueError, match="same name"):
        Split("chat@prod", 1, (arm("stable", 5_000), arm("stable", 5_000, 8002)))
    with pytest.raises(ValueError, match="same address"):
        Split("chat@prod", 1, (arm("stable", 5_000), Arm("candidate", "other", "127.0.0.1:8001", 5_000)))
    twin = Arm("candidate", arm("stable", 0).cluster, "127.0.0.1:8002", 5_000)
    with pytest.raises(ValueError, match="same cluster"):
        Split("chat@prod", 1, (arm("stable", 5_000), twin))


def test_revisions_start_at_one():
    with pytest.raises(ValueError, match="revision"):
        Split("chat@prod", 0)


def test_a_logged_cluster_is_an_arm_with_or_without_its_fallback():
    split = Split("chat@prod", 1, (arm("stable", 9_500), arm("candidate", 500, 8002)))
    candidate = split.arm("candidate")
    assert candidate is not None
    assert split.assigned(candidate.cluster) is candidate
    assert split.assigned(f"{candidate.cluster}+{split.arms[0].cluster}") is candidate
    assert split.assigned("strange") is None
    assert split.assigned(None) is None
