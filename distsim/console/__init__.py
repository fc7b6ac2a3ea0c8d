"""What a command prints: streams that may be closed, and text for a terminal."""
