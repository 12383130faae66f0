"""Which driver launches each engine."""

from workers.engines.base import Driver
from workers.engines.llamacpp import LLAMACPP
from workers.engines.sglang import SGLANG

DRIVERS: dict[str, Driver] = {one.name: one for one in (LLAMACPP, SGLANG)}
"""Engine name in a bundle → its driver."""
