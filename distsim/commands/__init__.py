"""The commands of ``distsim``, each imported when it is run: its options and what it does."""
