"""How to speak to an engine: one table an engine, `table.DIALECTS` names them all."""
