"""Finds out what a definition does when it runs, from calls on the meta device that leave it unchanged."""
