"""Memory: peaks, and what is in use over time."""
