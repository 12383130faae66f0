"""The traffic plane: an Envoy driven by files, its access log, and the switch for a controller that is gone."""
