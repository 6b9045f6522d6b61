"""Experiments: from a config to a result, a sweep or a table; with run directories, checkpoints and signals."""
