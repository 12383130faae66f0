"""What runs for long: reconciliation, staging, replicas of engines, gate runs and traffic."""
