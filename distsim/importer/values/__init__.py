"""What names of a graph stand for while it is read: operands, sequences of tensors, and their scopes."""
