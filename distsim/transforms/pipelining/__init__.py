"""A joint function is cut into pipeline stages."""
