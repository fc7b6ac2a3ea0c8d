"""The event engine: shared links, jitter, failures."""
