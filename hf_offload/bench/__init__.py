"""Measurements that the README and the notes quote; each a module to run with `python -m`."""
