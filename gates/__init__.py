"""What is measured and what it means: gates, statistics and decisions, without database or queue."""
