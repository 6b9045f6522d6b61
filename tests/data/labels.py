"""Labels and hypothesis settings that the tests of partitions and splits share."""

import numpy as np
from hypothesis import settings

fixed = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def labels_of(*class_sizes):
    """Shuffled labels with the given number of samples of each class."""
    labels = np.repeat(np.arange(len(class_sizes), dtype=np.int32), class_sizes)
    return np.random.default_rng(7).permutation(labels)


TEN = labels_of(*[20] * 10)
