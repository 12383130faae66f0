"""What a client of plain HTTP is given in the place of certificates."""

import ssl
from typing import Final

NO_AUTHORITY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Believes no certificate at all. An HTTP client that is given none reads those of every authority, which takes 20 ms,
though an address that begins with http:// never asks for them."""
