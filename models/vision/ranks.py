"""Training on several GPUs: a process for each, which share their gradients."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed, multiprocessing

_GRACE_S: Final = 30.0  # for the others, once one has ended with an error
_TIMEOUT: Final = timedelta(seconds=120)


class Ranks:
    """Rank of this process among those that train together; without others it shares nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def join(self, device: str) -> None:
        """Meet the others, once the processes that draw have been forked."""
        if self.world == 1:
            return
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(self.rank)
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(
            backend, rank=self.rank, world_size=self.world, timeout=_TIMEOUT
        )

    def leave(self) -> None:
        """Part from the others, once all are done."""
        if self.world > 1:
            self.same(0.0)
            distributed.destroy_process_group()

    def average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace the gradients by their mean over all."""
        if self.world == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        flat /= self.world
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

    def same(self, value: float) -> float:
        """Return the value of the first."""
        if self.world == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(told, 0)
        return float(told)

    def share(self, parameters: list[torch.nn.Parameter]) -> None:
        """Give everyone the weights of the first."""
        if self.world > 1:
            for parameter in parameters:
                distributed.broadcast(parameter.data, 0)


def run_ranks(work: Callable[[Any, Ranks], None], flags: Any, world: int) -> int:
    """Run `work` in so many processes, and return 0 once all have ended well.

    When one ends with an error the others get a while to end, too, and are ended then.
    """
    if world == 1:
        work(flags, Ranks(0, 1))
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=work, args=(flags, Ranks(rank, world))) for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.5)
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join(5)
            process.kill()
    codes: list[int] = [abs(process.exitcode or 0) for process in processes]
    return max(codes)
