"""PGFedSplit: the method, its Gaussians of prototypes, and its coefficient of mixture."""

from fedjax_pfl.methods.pgfedsplit.method import pgfedsplit

__all__ = ["pgfedsplit"]
