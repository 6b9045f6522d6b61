"""FedeCouple: the method, and the training of the personal head."""

from fedjax_pfl.methods.fedecouple.method import fedecouple

__all__ = ["fedecouple"]
