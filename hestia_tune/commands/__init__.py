"""Offer the commands. Each module takes a config and returns an exit code."""
