"""The reader of compiled programs in benchmarks/hlo.py, on programs whose loops and products are known."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "hlo.py"


@pytest.fixture(scope="module")
def hlo():
    spec = importlib.util.spec_from_file_location("hlo", FILE)
    module = sys.modules["hlo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def with_lines_of_code():
    """Programs that say which line an operation comes from, which those of other tests do not (see conftest.py)."""
    wanted = {"jax_traceback_in_locations_limit": 10, "jax_compilation_cache_include_metadata_in_key": True}
    usual = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in usual.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("with_lines_of_code")
def test_a_loop_of_known_length_counts_its_products_as_often_as_it_passes(hlo):
    def fn(a, b, stop):
        a = lax.fori_loop(0, 7, lambda _, a: jnp.tanh(a @ b), a)
        return lax.fori_loop(0, stop, lambda _, a: a @ b, a)

    a, b = jnp.ones((64, 32)), jnp.ones((32, 32))
    module = hlo.parse(jax.jit(fn).lower(a, b, jnp.int32(3)).compile().as_text())
    # A product takes all of its time for arithmetic; everything else, and waiting, none.
    rates = hlo.Rates(launch=0.0, wait=5.0, bytes=np.inf, flops=1.0)
    found = hlo.estimate(module, rates, {})
    assert sorted((loop.trips for loop in found.loops), key=str) == [7, None]
    product = 2 * 64 * 32 * 32
    assert found.total.arithmetic == (7 + 1) * product
    assert found.total.launch == 5.0
    # As though the loops came from a function of the package; the compiler's own number stands where it has one.
    module.frames = {frame: ["ops/walk.py:walk"] for frame in range(1000)}
    assert hlo.estimate(module, rates, {"walk": 3}).total.arithmetic == (7 + 3) * product
    assert hlo.estimate(module, rates, {"other": 3}).total.arithmetic == (7 + 1) * product


def test_of_two_branches_evaluation_takes_the_costlier_one(hlo):
    def fn(flag, a):
        return lax.cond(flag, lambda a: a @ a @ a, lambda a: a + 1.0, a)

    module = hlo.parse(jax.jit(fn).lower(jnp.array(True), jnp.ones((16, 16))).compile().as_text())
    rates = hlo.Rates(launch=0.0, wait=0.0, bytes=np.inf, flops=1.0)
    costs = [hlo.estimate(module, rates, {}, evaluate=flag).total.arithmetic for flag in (False, True)]
    assert costs == [0, 2 * 2 * 16**3]


TPU = """
%condition.1 (p: (s32[], f32[8,128])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(60)
  %counter = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%body.1 (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %twice = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"150"}
  ROOT %next = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%counter, %twice)
}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%a, %a)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%start), condition=%condition.1, body=%body.1
  ROOT %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_a_tpus_loop_has_the_length_that_its_counter_is_compared_with(hlo):
    found = hlo.estimate(hlo.parse(TPU), None, {})
    assert [loop.trips for loop in found.loops] == [60]
    assert found.total.cycles == 60 * 150
    assert found.total.kernels == 60


GPU = """
%fused (p0: f32[1000,64], p1: s32[]) -> f32[10,64] {
  %p0 = f32[1000,64]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[10,64]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={10,64}
}

ENTRY %main (pool: f32[1000,64], at: s32[], k: f32[3,3,8,16], x: f32[2,8,8,8]) -> f32[10,64] {
  %pool = f32[1000,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %k = f32[3,3,8,16]{3,2,1,0} parameter(2)
  %x = f32[2,8,8,8]{3,2,1,0} parameter(3)
  %conv = (f32[2,6,6,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, """
GPU += """custom_call_target="__cudnn$convForward"
  ROOT %taken = f32[10,64]{1,0} fusion(%pool, %at), kind=kLoop, calls=%fused
}
"""


def test_a_gpus_kernel_reads_no_more_than_the_slice_it_takes(hlo):
    per_byte = hlo.Rates(launch=0.0, wait=0.0, bytes=1.0, flops=np.inf)
    per_flop = hlo.Rates(launch=0.0, wait=0.0, bytes=np.inf, flops=1.0)
    module = hlo.parse(GPU)
    convolution = 4 * (2 * 8**3 + 9 * 8 * 16 + 2 * 6 * 6 * 16)
    assert hlo.estimate(module, per_byte, {}).total.memory == 2 * 4 * 10 * 64 + 4 + convolution
    assert hlo.estimate(module, per_flop, {}).total.arithmetic == 2 * (2 * 6 * 6 * 16) * 9 * 8
