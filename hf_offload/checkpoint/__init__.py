"""Checkpoints on disk: folders that appear whole or not at all, with the SHA-256 of every file in them."""
