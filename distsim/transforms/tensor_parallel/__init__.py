"""What tensor-parallel ranks do where they bring together the rows of sequences that they divide."""
