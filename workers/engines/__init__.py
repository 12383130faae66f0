"""How each engine is launched, and the launcher scripts that run beside it."""
