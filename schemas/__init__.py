"""The contract: closed documents and messages that every other part speaks."""

VERSION = "0.1.0"
"""Version of the software, as in pyproject.toml."""
