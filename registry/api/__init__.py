"""The HTTP interface: parse, authorize, call, answer."""
