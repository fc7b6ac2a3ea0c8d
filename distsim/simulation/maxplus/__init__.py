"""The exact engine: a Program block by block, as products of max-plus matrices."""
