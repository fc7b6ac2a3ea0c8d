"""Which op goes where, and what is kept."""
