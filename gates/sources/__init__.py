"""Where a bundle's files come from: what was asked for is resolved once, listed, and its bytes opened and verified.

A source knows nothing of what a bundle takes, and the fetcher nothing of the source's protocol: they meet in
`gates.sources.source`.
"""
