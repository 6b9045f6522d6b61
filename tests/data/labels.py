"""What the tests of partitions, splits and federations share: labels, hypothesis settings, a whole division."""

import numpy as np
from hypothesis import settings

from fedjax_pfl.data.divide import deal, federate

fixed = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def labels_of(*class_sizes):
    """Shuffled labels with the given number of samples of each class."""
    labels = np.repeat(np.arange(len(class_sizes), dtype=np.int32), class_sizes)
    return np.random.default_rng(7).permutation(labels)


TEN = labels_of(*[20] * 10)


def divide(dataset, *, validation_share=0.0, evaluate_on="test", **fields):
    """The federation and the manifest of a data set."""
    holdings, record = deal(dataset, validation_share=validation_share, **fields)
    return federate(dataset, holdings, validation_share=validation_share, evaluate_on=evaluate_on), record
