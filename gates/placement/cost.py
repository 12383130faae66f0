"""Formulas of time, capacity and price. Sources are the numbered equations and examples of the serving notes.

Everything is exact: whole numbers, `Decimal` and `Fraction`. What is unknown is an argument, never a default.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from math import ceil

Amount = int | Decimal | Fraction


def _exact(value: Amount, name: str, *, least: Amount = 0, above: bool = False) -> Fraction:
    number = Fraction(value)
    if number < Fraction(least) or (above and number == Fraction(least)):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}")
    return number


def request_ms(ttft_ms: Amount, itl_ms: Amount, output_tokens: int) -> Fraction:
    """Return the milliseconds from admission to the last token, `TTFT + (N − 1) · ITL`.

    Args:
        ttft_ms: time to first token, 0 or more.
        itl_ms: average time between tokens, 0 or more.
        output_tokens: generated, 1 or more.

    Raises:
        ValueError: a value is out of its range.

    Source: equation 4.1.
    """
    further = _exact(output_tokens, "output_tokens", least=1) - 1
    return _exact(ttft_ms, "ttft_ms") + further * _exact(itl_ms, "itl_ms")


def requests_per_second(tokens_per_second: Amount, output_tokens: Amount) -> Fraction:
    """Return the requests a second of a replica: its sustained output tokens a second by the average answer's tokens.

    Raises:
        ValueError: a rate is negative, or an answer has no tokens.

    Source: section 4.1; it holds for the mix of lengths that the rate was measured with.
    """
    return _exact(tokens_per_second, "tokens_per_second") / _exact(output_tokens, "output_tokens", above=True)


def per_million(price_per_hour: Amount, tokens_per_second: Amount) -> Fraction:
    """Return the price of one million output tokens, `P · 10⁶ / (3600 · R)`, in the currency of `price_per_hour`.

    Args:
        price_per_hour: of all devices of one replica, 0 or more.
        tokens_per_second: output tokens that the replica sustains within its objectives, above 0; measured.

    Raises:
        ValueError: a value is out of its range.

    Source: equation 4.2.
    """
    rate = _exact(tokens_per_second, "tokens_per_second", above=True)
    return _exact(price_per_hour, "price_per_hour") * 10**6 / (3600 * rate)


def replicas(demand: Amount, capacity: Amount, *, utilization: Amount = 1, spare: int = 0) -> int:
    """Return the replicas for a demand: `⌈demand / (capacity · utilization)⌉`, and spare ones for failures.

    Args:
        demand: requests a second, 0 or more.
        capacity: requests a second that one warmed replica sustains, above 0.
        utilization: share of the capacity that is planned with, above 0 and at most 1.
        spare: further replicas, 0 or more.

    Raises:
        ValueError: a value is out of its range.

    Source: sections 1.5, 4.1 and 4.8.
    """
    share = _exact(utilization, "utilization", above=True)
    if share > 1 or spare < 0:
        raise ValueError("utilization is at most 1, and spare at least 0")
    return ceil(_exact(demand, "demand") / (_exact(capacity, "capacity", above=True) * share)) + spare


def warm_up_seconds(stages: Sequence[Amount]) -> Fraction:
    """Return the seconds until a new replica serves: its stages one after the other, each 0 or more.

    Args:
        stages: such as node allocation, image and weights, kernels and graphs, health.

    Raises:
        ValueError: a stage is negative.

    Source: section 4.8.
    """
    return sum((_exact(one, "stage") for one in stages), Fraction(0))


def tokens_per_pass(acceptance: Amount, proposed: int) -> Fraction:
    """Return the average tokens of one target pass in speculative decoding, `(1 − α^(k+1)) / (1 − α)`.

    Args:
        acceptance: α, the chance that a proposed token is accepted, each on its own; from 0 to 1.
        proposed: k, tokens that the draft proposes a pass, 0 or more.

    Raises:
        ValueError: a value is out of its range.

    Source: section 4.6; Leviathan et al. 2023, equation 1. What the draft itself takes is not in it.
    """
    share = _exact(acceptance, "acceptance")
    if share > 1 or proposed < 0:
        raise ValueError("acceptance is at most 1, and proposed at least 0")
    return Fraction(proposed + 1) if share == 1 else (1 - share ** (proposed + 1)) / (1 - share)


def transfer_seconds(
    cache_bytes: int, bytes_per_second: Amount, *, setup: Amount = 0, metadata: Amount = 0, conversion: Amount = 0
) -> Fraction:
    """Return the seconds to move a sequence's cache: `bytes / bandwidth + setup + metadata + layout conversion`.

    Args:
        cache_bytes: 0 or more.
        bytes_per_second: effective, above 0.
        setup: seconds to begin, 0 or more.
        metadata: seconds for what describes the cache, 0 or more.
        conversion: seconds to convert its layout, 0 or more.

    Raises:
        ValueError: a value is out of its range.

    Source: "Disaggregation adds a state-transfer system". What overlaps with other work is not on a request's path.
    """
    moved = _exact(cache_bytes, "cache_bytes") / _exact(bytes_per_second, "bytes_per_second", above=True)
    return moved + _exact(setup, "setup") + _exact(metadata, "metadata") + _exact(conversion, "conversion")


def disaggregation_gain_ms(saved_ms: Amount, transfer_ms: Amount) -> Fraction:
    """Return what separate prefill and decode pools gain a request, in milliseconds; below 0 they lose.

    Args:
        saved_ms: queue and compute time that separate pools save, 0 or more; measured.
        transfer_ms: exposed time of the cache's transfer at the same context, 0 or more; measured.

    Raises:
        ValueError: a value is negative.

    Source: section 4.8.
    """
    return _exact(saved_ms, "saved_ms") - _exact(transfer_ms, "transfer_ms")


def wait_ms(queue_ms: Amount, reused_tokens: int, prefill_ms_per_token: Amount) -> Fraction:
    """Return an endpoint's queue less the prefill that its cached prefix saves, in milliseconds; the least is best.

    Args:
        queue_ms: estimated, 0 or more.
        reused_tokens: of the prompt that are cached there, 0 or more; 0 when nothing is known.
        prefill_ms_per_token: measured, 0 or more.

    Raises:
        ValueError: a value is negative.

    Source: section 4.7.
    """
    saved = _exact(reused_tokens, "reused_tokens") * _exact(prefill_ms_per_token, "prefill_ms_per_token")
    return _exact(queue_ms, "queue_ms") - saved
