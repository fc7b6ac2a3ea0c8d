"""What a search found, for people: texts, tables of several clusters, what a page shows."""
