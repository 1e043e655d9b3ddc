"""Reads files that others give, each kind in one place; what is wrong with one is one error with its place."""
