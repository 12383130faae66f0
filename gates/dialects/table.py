"""Which dialect each engine speaks."""

from gates.dialects import releases
from gates.dialects.base import Dialect
from gates.dialects.external import EXTERNAL
from gates.dialects.llamacpp import LLAMACPP
from gates.dialects.sglang import SGLANG
from gates.dialects.tgi import TGI
from gates.dialects.transformers import TRANSFORMERS
from gates.dialects.trtllm import TRTLLM
from gates.dialects.vllm import VLLM
from schemas.bundle import Engine

DIALECTS: dict[str, Dialect] = {one.name: one for one in (EXTERNAL, LLAMACPP, SGLANG, TGI, TRANSFORMERS, TRTLLM, VLLM)}
"""Engine name in a bundle → its dialect, whatever its version."""


def dialect_of(engine: Engine) -> Dialect:
    """Return how an engine of a bundle is spoken to, with what it can do in its version. Raises KeyError."""
    return releases.in_version(DIALECTS[engine.name], engine.version)
