"""Trains with the peer (speculators 0.9.0), run by the peer's own interpreter as a script: `peer_child.py job.json`.

The peer expects a GPU: its device look-ups are pointed at the CPU. Rows come in the order that the job lists, so that
both sides see the same batches. What is measured: when each optimiser step ended, and memory. Nothing else is changed.

job.json: arguments [str], batches [[row]], steps, weights (directory to save to), result (file to write)
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any


class _Done(BaseException):
    """The steps that were asked for are done. Not an Exception, so that nothing on the way handles it."""


def main(job_file: str) -> None:
    """Train as the job says, and write {times, processor, rise, level} to its result file."""
    job = json.loads(Path(job_file).read_text())
    torch = import_module("torch")
    cli = import_module("speculators.train.cli")
    trainer_module = import_module("speculators.train.trainer")
    _point_at_cpu(torch, trainer_module)
    _use_batches(job["batches"])
    times: list[float] = []
    processor: list[float] = []
    trainers: list[Any] = []
    trainer_class = trainer_module.Trainer
    make, after_step = trainer_class.__init__, trainer_class._schedulers_step

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        trainers.append(self)

    def note_time(self: Any) -> None:
        after_step(self)
        times.append(time.perf_counter())
        processor.append(time.process_time())
        if len(times) == job["steps"]:
            raise _Done

    trainer_class.__init__, trainer_class._schedulers_step = remember, note_time
    config = import_module("speculators.train.config").TrainConfig
    memory = import_module("anonymous_memory").PeakAnonymousMemory()
    sys.argv = ["train", *job["arguments"]]
    with suppress(_Done):
        cli.main(config.resolve())
    memory.stop()
    trainers[0].model.save_pretrained(job["weights"])
    Path(job["result"]).write_text(
        json.dumps({"times": times, "processor": processor, "rise": memory.rise, "level": memory.level})
    )


def _point_at_cpu(torch: Any, trainer_module: Any) -> None:
    cpu = torch.device("cpu")
    ranks: Any = import_module("speculators.train.distributed")
    saving: Any = import_module("speculators.train.checkpointer")
    recovery: Any = import_module("speculators.train.recovery")
    ranks.get_local_rank = trainer_module.get_local_rank = lambda: "cpu"
    saving.get_current_device = lambda: cpu
    recovery.BatchRecoveryCoordinator._default_device = staticmethod(lambda: cpu)
    torch.accelerator.synchronize = lambda *args: None
    torch.accelerator.is_available = lambda: False
    torch.accelerator.memory_allocated = lambda *args: 0
    torch.accelerator.current_accelerator = lambda *args, **kwargs: cpu


def _use_batches(batches: list[list[int]]) -> None:
    numpy = import_module("numpy")
    sampler = import_module("speculators.train.distributed_batch_sampler").MultipackDistributedBatchSamplerV2
    listed = [numpy.array(batch) for batch in batches]
    sampler._generate_batches = lambda self, epoch: listed


if __name__ == "__main__":
    main(sys.argv[1])
