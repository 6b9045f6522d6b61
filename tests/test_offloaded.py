"""Clients' states in the host's memory: the same run, with no more of them on the device than work at a time."""

import jax
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, compare, simulate
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.hardware import Hardware
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.programs import traced
from fedjax_pfl.ops.tree import size
from tests.interruption import KilledError, killed_after

CLIENTS, COHORT = 9, 2


def config(where, **tables):
    base = {
        "data": {"source": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "beta": 0.3}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedper"},
        "training": {"rounds": 4, "batch_size": 16, "lr": 0.1},
        "participation": {"ratio": 0.25},
        "run": {"eval_every": 3, "client_state": where},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def assert_same(found, expected):
    """States, scores and answers of two results, up to the order of sums."""
    jax.tree.map(close, found.state, expected.state)
    for part in ("history", "clients", "labels", "exported"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"seconds"}:
            close(ours[name], theirs[name])
    assert found.summary["traffic"] == expected.summary["traffic"]


def test_a_killed_run_goes_on_wherever_states_were_and_are(tmp_path):
    # A head for each client.
    run = {"checkpoint_every": 2}
    whole = simulate(config("host", run={**run, "out": str(tmp_path / "whole"), "client_state": "host"}))
    for begun, resumed in (("host", "host"), ("host", "device"), ("device", "host")):
        out = tmp_path / f"{begun}_{resumed}"
        with pytest.raises(KilledError):
            simulate(config(begun, run={**run, "out": str(out), "client_state": begun}), progress=killed_after(2))
        result = simulate(config(resumed, run={**run, "out": str(out), "client_state": resumed}), resume=out)
        if begun == resumed:
            jax.tree.map(np.testing.assert_array_equal, result.state, whole.state)
        assert_same(result, whole)


def test_runs_of_one_program_go_one_by_one():
    """Their states would change in one place if they shared any."""
    rows = [compare(config(where), ["fedper"], seeds=[0, 1]).rows() for where in ("host", "device")]
    for row, expected in zip(*rows, strict=True):
        for name in ("seed", "pre", "post", "std_clients", "megabytes"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(
            {"data": {"new_clients": 0.35}, "run": {"eval_every": 3, "export": ["predictions"], "placement": "vmap"}},
            id="with new clients and what they answer",
        ),
        pytest.param(
            {
                "data": {"new_clients": 0.2},
                "method": {"name": "ccvr"},
                "run": {"eval_every": 3, "export": ["features"], "export_clients": [1, 4]},
            },
            id="calibrated before scoring, but for the training of new clients",
        ),
        pytest.param(
            {
                "data": {"new_clients": 0.2},
                "model": {"name": "mlp_proj"},
                "method": {"name": "pfedcspc"},
                "run": {"eval_every": 3, "export": ["predictions"]},
            },
            id="scored with what no round sends",
        ),
        pytest.param(
            {
                "participation": {"ratio": 1.0},
                "method": {"name": "fedrep", "final_head_epochs": 1},
                "training": {"lr_decay": 0.5},
            },
            id="everybody takes part, and trains before it is scored",
        ),
        pytest.param(
            {
                "participation": {"ratio": [0.2, 0.6], "dropout": 0.4},
                "run": {"eval_every": 3, "placement": "shard"},
            },
            id="some drop out, on several devices",
        ),
    ],
)
def test_a_run_is_that_with_all_states_on_the_device(tables):
    results = [simulate(_with(tables, where)) for where in ("host", "device")]
    assert_same(*results)
    states = results[0].state.clients
    assert all(len(leaf) == CLIENTS and leaf.flags.c_contiguous for leaf in jax.tree.leaves(states))


def _with(tables, where):
    return config(where, **{**tables, "run": {**tables.get("run", {"eval_every": 3}), "client_state": where}})


def test_no_function_of_a_device_sees_more_states_than_a_cohort_has():
    program = lay_out([config("host", data={"clients": 40}, participation={"ratio": 0.05})], load("digits"))
    one = size(program.one_run().state.clients) // 40
    functions = traced(program)
    assert set(functions) == {"round", "pre", "start", "select", "of_server", "initial"}
    for name, of_group in (("round", lambda args: args[3]), ("pre", lambda args: args[3].clients)):
        assert size(of_group(functions[name][1])) == COHORT * one
    known = size((program.samples, program.rows[0], jax.eval_shape(lambda: program.one_run())._replace(state=None)))
    server = size(program.one_run().state.server)
    assert all(size(arguments) <= known + server + COHORT * one + 100 for _, arguments in functions.values())


def test_what_does_not_fit_a_device_is_told_of_the_host_and_fits_from_there():
    def memory(where, backend, bytes_):
        hardware = Hardware(backend, tuple(jax.devices()[:1]), bytes_)
        return lay_out([config(where, data={"clients": 300}, participation={"ratio": 0.01})], load("digits"), hardware)

    on_device, on_host = (memory(where, "gpu", 10**9).memory for where in ("device", "host"))
    states = on_device.states
    assert on_host.states == 0
    assert states == size(memory("host", "gpu", 10**9).one_run().state.clients)
    assert on_device.resident - on_host.resident == pytest.approx(states, rel=0.01)
    few = on_host.total(chunk=2)
    assert few < on_device.resident
    assert memory("host", "gpu", few).engine.placement.chunk >= 1
    with pytest.raises(ConfigError, match=r'data\.clients = 300 .* with run\.client_state = "host", the states of all'):
        memory("device", "gpu", few)


def test_a_method_that_begins_with_all_clients_at_once_is_refused_and_not_told_of_the_host():
    with pytest.raises(ConfigError, match=r"run\.client_state = 'host' .* the method's round before the first"):
        simulate(config("host", method={"name": "fedfcd"}))
    tables = {"method": {"name": "fedfcd"}, "data": {"clients": 300}, "participation": {"ratio": 0.01}}

    def fits(bytes_):
        hardware = Hardware("gpu", tuple(jax.devices()[:1]), bytes_)
        return lay_out([config("device", **tables)], load("digits"), hardware).memory

    memory = fits(10**9)
    with pytest.raises(ConfigError, match=r"data\.clients = 300 is not usable: .* a device has \S+ GB$"):
        fits(memory.total(chunk=1) - memory.states // 2)
