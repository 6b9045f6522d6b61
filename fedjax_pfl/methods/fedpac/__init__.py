"""FedPAC: the method, the weights of its clients' heads, and the quadratic programs that they solve."""

from fedjax_pfl.methods.fedpac.method import fedpac

__all__ = ["fedpac"]
