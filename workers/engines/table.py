"""Which driver launches each engine."""

from workers.engines.base import Driver
from workers.engines.external import EXTERNAL
from workers.engines.llamacpp import LLAMACPP
from workers.engines.sglang import SGLANG
from workers.engines.tgi import TGI
from workers.engines.transformers import TRANSFORMERS
from workers.engines.trtllm import TRTLLM
from workers.engines.vllm import VLLM

DRIVERS: dict[str, Driver] = {one.name: one for one in (EXTERNAL, LLAMACPP, SGLANG, TGI, TRANSFORMERS, TRTLLM, VLLM)}
"""Engine name in a bundle → its driver."""
