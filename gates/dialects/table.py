"""Which dialect each engine speaks."""

from gates.dialects.base import Dialect
from gates.dialects.llamacpp import LLAMACPP

DIALECTS: dict[str, Dialect] = {LLAMACPP.name: LLAMACPP}
"""Engine name in a bundle → its dialect."""
