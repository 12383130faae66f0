"""What an engine that booted says of itself, held against what its bundle says. Asks nobody: pages are handed in."""
