"""Blocks that a function repeats become one callee, and are written out again."""
