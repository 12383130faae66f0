"""Which driver launches each engine."""

from workers.engines.base import Driver
from workers.engines.llamacpp import LLAMACPP

DRIVERS: dict[str, Driver] = {LLAMACPP.name: LLAMACPP}
"""Engine name in a bundle → its driver."""
