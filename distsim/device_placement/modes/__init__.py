"""The modes of graph partitioning that torch.fx has, and what they share."""
