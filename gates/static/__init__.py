"""The static gate: everything about a composition that can be known before an engine is started.

`examine` runs every check over a `Composition`. Checks are grouped by noun, one module each; what they can say is
the catalogue `CODES`. What depends on an engine's version is data: `engines.json`, `libraries.json`,
`hardware.json`, and names and shapes of tensors are `architectures.json`.
"""
