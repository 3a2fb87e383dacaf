"""Running a function in several processes that share a gloo group."""

import faulthandler
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in `world_size` new processes; what each rank returned.

    Raises:
        ProcessRaisedException: The function failed, with its traceback.
        RuntimeError: A process ended without an exception, with the end of its stderr. Where it was killed by a signal
            (gloo's own threads abort the process when a connection breaks), all had been tried a second time.
    """
    # One server imports torch, and each process is a fork of it.
    multiprocessing.set_forkserver_preload(["tests.parallel.training", "tests.parallel.checkpoints"])
    try:
        return _run_once(world_size, function, args)
    except _Killed as error:
        warnings.warn(f"{function.__name__} is tried again. {error}", stacklevel=2)
        return _run_once(world_size, function, args)


class _Killed(RuntimeError):
    """A process ended by a signal."""


def _run_once(world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _worker, (world_size, folder, function, args), nprocs=world_size, start_method="forkserver", join=True
            )
        except mp.ProcessExitedException as error:
            # In one line, because that is what pytest's summary shows.
            stderr = Path(folder, f"{error.error_index}.err")
            lines = stderr.read_text().splitlines()[-60:] if stderr.exists() else []
            told = [line.strip() for line in lines if "/multiprocessing/" not in line and "Extension" not in line]
            raise (_Killed if error.signal_name else RuntimeError)(f"{error}: {' | '.join(told)}") from None
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _worker(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.dup2(os.open(Path(folder) / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
