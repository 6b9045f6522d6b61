"""pFedCSPC: its hyperparameters (factory), the algorithm (method), and the parts of it, one per file."""

from fedjax_pfl.methods.pfedcspc.factory import pfedcspc

__all__ = ["pfedcspc"]
