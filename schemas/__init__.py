"""The contract: closed documents and messages that every other part speaks."""
