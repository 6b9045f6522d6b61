"""Programs as jobs of a SLURM cluster, one job per program, submitted by submitit as one job array.

A job that must stop (its time is up, or another job takes its place) writes checkpoints and is queued again, and then
continues from them. Jobs go on after the process that submitted them has ended: the same call finds them again.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.checkpoint import Stop
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.folders import write_atomically
from fedjax_pfl.experiment.worker import (
    Outcome,
    Report,
    Surroundings,
    in_short,
    run_elsewhere,
    settled,
    surroundings,
)

_FOLDER = "jobs"
_CLUSTERS = ("slurm", "local")
# submitit's default time limit is five minutes. All output of a job goes to one file.
_DEFAULTS = {
    "cluster": "slurm",
    "max_num_timeout": 3,
    "name": "fedjax_pfl",
    "timeout_min": 60,
    "stderr_to_stdout": True,
}
# A program is one process.
_PROCESSES = ("nodes", "tasks_per_node", "ntasks_per_node")
_SECONDS_BETWEEN_LOOKS = 1.0


class Job:
    """A program in the form that submitit needs: callable, and submitted again by ``checkpoint``."""

    def __init__(self, configs: Sequence[Config], data: Any, around: Surroundings):
        """Takes the arguments of `run_elsewhere`."""
        self._configs, self._data, self._around = configs, data, around

    def __call__(self) -> Outcome:
        """Runs the program from its newest checkpoints, in the job's process, after submitit has prepared it.

        submitit's own signal handler would queue the job again in the middle of a round, and ignores SIGTERM. Here
        these signals are passed to the driver, which first writes checkpoints. If several signals come, as in a
        preemption, the last one counts.
        """
        import submitit

        environment, stop = submitit.JobEnvironment(), Stop()
        preempted = signal.Signals[f"SIG{environment.USR_SIG}"]
        queue_again: Any = signal.getsignal(preempted)
        for number in (signal.SIGINT, signal.SIGTERM, preempted):
            signal.signal(number, stop.ask)
        try:
            try:
                outcome = run_elsewhere(self._configs, self._data, self._around, say=_print)
            except SystemExit:
                outcome = [ended for config in self._configs if (ended := settled(config)) is not None]
                if len(outcome) == len(self._configs):  # the signal came when there was nothing left to run
                    return outcome
                if stop.signal == preempted or (stop.signal == signal.SIGTERM and not _is_ended(environment)):
                    queue_again(preempted, None)
                raise
        except Exception as error:  # whatever a program does
            traceback.print_exc()
            outcome = [f"{type(error).__name__}: {' '.join(str(error).split())}"] * len(self._configs)
        _print(in_short(outcome))
        return outcome

    def checkpoint(self) -> Any:
        """The submission to run when the job is started again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def run_as_jobs(
    programs: Sequence[Sequence[Config]], data: Any, report: Report, **options: Any
) -> Iterator[tuple[int, Outcome]]:
    """Runs programs as jobs; yields outcomes in the order in which jobs end.

    Args:
      programs: the configs of each program; their run directories are in one folder, which all machines share.
      data: as in `simulate`.
      report: called with a program's number and a line of text when the state of its job changes.
      options: as in `check_jobs`.

    Raises:
      ConfigError: SLURM does not accept the jobs.
    """
    folder = Path(str(programs[0][0].run.out)).parent / _FOLDER
    executor, around = _executor(folder, options), surroundings(programs)
    runs = [{Path(str(config.run.out)).name: _hash(config) for config in configs} for configs in programs]
    outlive = executor.cluster == "slurm"
    at_work = _jobs_at_work(folder) if outlive else []
    waiting, new = {}, []
    for number, mine in enumerate(runs):
        taken = [(job, theirs) for job, theirs in at_work if mine.keys() & theirs.keys()]
        if not taken:
            new.append(number)
        elif list(taken[0][1].items()) == list(mine.items()):  # in this order come the results
            waiting[number] = taken[0][0]
        else:
            ids = ", ".join(job.job_id for job, _ in taken)
            same = all(theirs.get(name, mine[name]) == mine[name] for _, theirs in taken for name in mine)
            these = "some of these runs" if same else "these runs under another config"
            yield number, [f"job {ids} is at work on {these}: wait for its end, or cancel it"] * len(mine)
    waiting |= dict(zip(new, _submit(executor, [Job(programs[number], data, around) for number in new]), strict=True))
    for number in new if outlive else ():
        write_atomically(_record(folder, waiting[number].job_id), json.dumps(runs[number]))
    states: dict[int, str] = {}
    try:
        for number, job in waiting.items():
            report(number, f"{'handed over' if number in new else 'found'} as job {job.job_id}")
        while waiting:
            for number, job in list(waiting.items()):
                if job.done():
                    outcome = _outcome_of(waiting.pop(number), len(runs[number]))
                    report(number, in_short(outcome))
                    yield number, outcome
                elif (state := job.state) not in (states.get(number), "UNKNOWN"):
                    states[number] = state
                    report(number, f"job {job.job_id} is {state.lower()}")
            time.sleep(_SECONDS_BETWEEN_LOOKS if waiting else 0)
    finally:
        if not outlive:
            for job in waiting.values():
                job.cancel()
            for job in waiting.values():
                job.wait()


def check_jobs(options: Mapping[str, Any], out: str | os.PathLike[str] | None) -> None:
    """Checks that programs can be submitted to the cluster.

    Args:
      options: ``cluster`` (``slurm``, or ``local`` for processes of this machine), ``max_num_timeout`` (how often a job
        that has used up its time is queued again), and the options of submitit's ``AutoExecutor.update_parameters``:
        ``timeout_min``, ``cpus_per_task``, ``gpus_per_node``, ``mem_gb``, ``slurm_partition``, ...
      out: the folder of the runs.

    Raises:
      ConfigError: submitit is not installed, no folder is given, there is no SLURM, or an option cannot be used.
    """
    try:
        import submitit  # noqa: F401  # only whether it can be
    except ImportError:
        raise ConfigError("executor", "submitit", 'it needs submitit: pip install "fedjax_pfl[submitit]"') from None
    if out is None:
        raise ConfigError("executor", "submitit", "it needs out: a folder on a file system that all machines share")
    with tempfile.TemporaryDirectory() as folder:
        _executor(Path(folder), options)


def _executor(folder: Path, options: Mapping[str, Any]) -> Any:
    """submitit's executor with these options."""
    import submitit

    parameters: dict[str, Any] = _DEFAULTS | dict(options)
    cluster, timeouts = parameters.pop("cluster"), parameters.pop("max_num_timeout")
    if cluster not in _CLUSTERS:
        raise ConfigError("executor.cluster", cluster, one_of(cluster, _CLUSTERS))
    if not isinstance(timeouts, int) or timeouts < 0:
        raise ConfigError("executor.max_num_timeout", timeouts, "a whole number, 0 or more")
    for name, value in parameters.items():
        if name.removeprefix("slurm_") in _PROCESSES:
            raise ConfigError(f"executor.{name}", value, "leave it out: a program is one process")
    limits = {f"{cluster}_max_num_timeout": timeouts, f"{cluster}_max_pickle_size_gb": math.inf}
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, **limits)
    except RuntimeError:
        allowed = 'a machine that SLURM\'s srun is found on; cluster = "local" runs the jobs as processes of this one'
        raise ConfigError("executor.cluster", cluster, allowed) from None
    try:
        if cluster == "slurm":
            # Without this, some clusters do not allow a job to be queued again.
            more = {"requeue": True, **parameters.get("slurm_additional_parameters", {})}
            parameters["slurm_additional_parameters"] = more
        executor.update_parameters(**parameters)
    except (NameError, AssertionError, TypeError, ValueError) as error:
        allowed = f"parameters of submitit's AutoExecutor: {str(error).splitlines()[0]}"
        raise ConfigError("executor", dict(options), allowed) from None
    return executor


def _submit(executor: Any, jobs: list[Job]) -> list[Any]:
    """Submits jobs as one array."""
    import submitit

    if not jobs:
        return []
    try:
        return executor.submit_array(jobs)
    except submitit.core.utils.FailedJobError as error:  # the message of sbatch
        allowed = f"parameters that the cluster takes: {' '.join(str(error).split())}"
        raise ConfigError("executor", executor.parameters, allowed) from None


def _outcome_of(job: Any, runs: int) -> Outcome:
    """The outcome of a job that has ended, of so many runs."""
    if job.exception() is None:
        outcome: Outcome = job.result()
    else:
        said = (job.stdout() or "nothing").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "nothing")
        outcome = [f"the job ended without a result ({job.state}); the last that it said: {last}"] * runs
    return [f"{of_run} (log: {job.paths.stdout})" if isinstance(of_run, str) else of_run for of_run in outcome]


def _hash(config: Config) -> str:
    """A short hash of a config, wherever its run is recorded."""
    return hashlib.sha256(config.replace("run.out", None).to_toml().encode()).hexdigest()[:12]


def _record(folder: Path, job_id: str) -> Path:
    """The file that lists the run directories on which a job works, each with the `_hash` of its config."""
    return folder / f"{job_id}_runs.json"


def _jobs_at_work(folder: Path) -> list[tuple[Any, dict[str, str]]]:
    """The SLURM jobs of earlier calls that are still in the queue, each with what its `_record` lists."""
    import submitit

    found = []
    for record in sorted(folder.glob(_record(folder, "*").name)):
        job: Any = submitit.SlurmJob(folder=folder, job_id=record.name.removesuffix(_record(folder, "").name))
        if not job.paths.result_pickle.exists() and _in_queue(job.job_id):
            found.append((job, json.loads(record.read_text(encoding="utf-8"))))
    return found


def _is_ended(environment: Any) -> bool:
    """Whether SLURM is already ending this job, for instance by `scancel`; it must then not be queued again."""
    return environment.cluster == "slurm" and _in_queue(environment.job_id) != "RUNNING"


def _in_queue(job_id: str) -> str:
    """The state of a job in SLURM's queue, such as ``PENDING`` or ``COMPLETING``; empty if it has ended."""
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _print(line: str) -> None:
    print(line, flush=True)
