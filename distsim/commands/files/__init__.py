"""What commands read of other programs, and write for them, beside their own options."""
