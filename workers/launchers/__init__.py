"""Where an engine's process runs: on this machine, in a container, in a cluster."""
