"""What no plan can be better than: proven bounds, from the model alone and from plans that were built."""
