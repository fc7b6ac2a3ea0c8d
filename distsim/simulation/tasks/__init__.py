"""Ops as tasks on streams; rank classes; a block as a max-plus matrix."""
