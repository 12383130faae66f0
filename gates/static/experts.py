"""Over how many devices experts are spread, and whether an engine spreads a number that does not divide.

Source: vLLM 0.32, fused_moe/expert_map_manager.py (`determine_expert_map` gives the remainder to the first devices)
and fused_moe/layer.py (balancing of experts wants the same number on each); SGLang, fused_moe_triton/layer.py.
"""

from typing import Final

from gates.static.composition import Composition
from gates.static.declared import Declared
from gates.static.shape import Shape

SPREAD: Final = ("--enable-expert-parallel", "--enable-ep-moe")
"""Arguments by which an engine spreads experts over all devices that it has for a layer."""


def expert_degree(declared: Declared, shape: Shape) -> int:
    """Return over how many devices experts are spread: what is declared, or all that share a layer where flags say."""
    degree = declared.degree("expert")
    if degree > 1 or not shape.experts or not declared.arguments.has(*SPREAD):
        return degree
    return declared.degree("tensor") * (1 if declared.shares_attention else declared.degree("data"))


def even_experts(c: Composition, shape: Shape) -> int | None:
    """Return how many experts, copies included, the devices have to share evenly; None where they need not."""
    rule = c.rules.get("experts_divide")
    arguments = c.declared.arguments
    if isinstance(rule, dict):
        is_even = arguments.has(*rule["flags"]) or shape.model_type in rule["model_types"]
    else:
        is_even = rule is not False
    if not shape.experts or not is_even:
        return None
    balancing = arguments.json("--eplb-config") or {}
    told = balancing.get("num_redundant_experts")
    copies = arguments.number("--ep-num-redundant-experts", "--num-redundant-experts")
    return shape.experts + (copies or (told if type(told) is int and told > 0 else 0))
