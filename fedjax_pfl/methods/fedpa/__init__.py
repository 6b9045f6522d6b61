"""FedPA, generator-based federated prototype adversarial learning: the method, and its generator of features."""

from fedjax_pfl.methods.fedpa.method import fedpa

__all__ = ["fedpa"]
