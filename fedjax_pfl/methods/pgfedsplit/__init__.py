"""PGFedSplit: the method, its Gaussians of features, and its coefficient of mixture."""

from fedjax_pfl.methods.pgfedsplit.method import pgfedsplit

__all__ = ["pgfedsplit"]
