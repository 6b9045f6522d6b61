"""Keys of a random generator of a few operations, for tests that compile rounds.

Threefry, JAX's default, has loops that are a quarter of what XLA compiles in programs as small as these. The engine and
the methods owe which key each draw has, not the numbers that come out. Runs by a config have JAX's own generator.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def key(seed: int):
    """A key, as ``jax.random.key`` makes one."""
    return jax.random.key(seed, impl=QUICK)


def mixed(word, numbers, salt):
    """A hash of a word with each number: the finaliser of MurmurHash3."""
    h = (numbers * jnp.uint32(0x9E3779B9)) ^ (word + jnp.uint32(salt))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def derived(words, numbers):
    """A key for each number."""
    numbers = numbers.astype(jnp.uint32)
    return jnp.stack([mixed(words[0], numbers, 1), mixed(words[1], numbers, 2)], axis=-1)


def counted(shape):
    return jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)


QUICK = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: derived(jnp.zeros(2, jnp.uint32), seed),
    split=lambda words, shape: derived(words, counted(shape)),
    random_bits=lambda words, bits, shape: mixed(words[0], mixed(words[1], counted(shape), 3), 4).astype(f"uint{bits}"),
    fold_in=lambda words, number: derived(words, jnp.bitwise_not(number)),
    name="quick",
)
