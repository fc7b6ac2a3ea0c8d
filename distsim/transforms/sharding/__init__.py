"""Layouts over mesh axes, found by least cost, and the collectives that they need."""
