"""Program: the scheduled step as a table of calls, and what reads it as one Function."""
