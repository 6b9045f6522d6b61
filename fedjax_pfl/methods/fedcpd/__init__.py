"""FedCPD: the method, and its distillation of feature maps."""

from fedjax_pfl.methods.fedcpd.method import fedcpd

__all__ = ["fedcpd"]
