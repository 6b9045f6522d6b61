"""FedPAC: the method, and the weights of its clients' heads."""

from fedjax_pfl.methods.fedpac.method import fedpac

__all__ = ["fedpac"]
