"""The demonstration: four releases on a fresh stack, under live traffic, told as they happen."""
