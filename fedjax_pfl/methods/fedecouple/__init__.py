"""FedeCouple: the method, the training of the personal head, and the server's weights."""

from fedjax_pfl.methods.fedecouple.method import fedecouple

__all__ = ["fedecouple"]
