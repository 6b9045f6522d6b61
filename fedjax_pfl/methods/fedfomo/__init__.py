"""FedFomo: the method, and the candidates that a client mixes."""

from fedjax_pfl.methods.fedfomo.method import fedfomo

__all__ = ["fedfomo"]
