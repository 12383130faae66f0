"""Reads what a bundle's files say without trusting them: weights, JSON, names, contents, chat templates.

Everything here is bounded in memory and time whatever the bytes are, refuses what two readers could read differently,
and says in each refusal which file, where, what was found and what was expected.
"""
