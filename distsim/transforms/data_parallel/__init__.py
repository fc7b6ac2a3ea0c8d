"""Parameters divided over data-parallel ranks, gathered where they are used."""
