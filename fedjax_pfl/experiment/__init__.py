"""Experiments: from a config to a result, a sweep or a table. All that touches disk, signals and clocks is here."""
