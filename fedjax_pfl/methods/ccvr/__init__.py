"""CCVR: the method, the calibration of any host's global model, and its Gaussians of features."""

from fedjax_pfl.methods.ccvr.method import calibrated, ccvr

__all__ = ["calibrated", "ccvr"]
