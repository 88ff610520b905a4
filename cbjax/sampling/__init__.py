"""Sampling, per row and on the device.

Re-exported here is the host side (NumPy only). The device side is `cbjax.sampling.sample`, a module of its
own, so that importing the parameters does not import jax.
"""

from cbjax.sampling.params import EPSILON as EPSILON
from cbjax.sampling.params import NUM_WORDS as NUM_WORDS
from cbjax.sampling.params import SamplingParams as SamplingParams
from cbjax.sampling.params import derive_seed as derive_seed
