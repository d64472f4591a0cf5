"""Checks that what is stored is consistent."""
