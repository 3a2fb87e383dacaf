"""Running a function in several processes that share a gloo group."""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in `world_size` new processes; what each rank returned."""
    # One server imports torch, and each process is a fork of it.
    multiprocessing.set_forkserver_preload(["tests.parallel.training", "tests.parallel.checkpoints"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _worker, (world_size, folder, function, args), nprocs=world_size, start_method="forkserver", join=True
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _worker(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
