"""The parts of a layer: what layers are written with, attention, feed-forwards."""
