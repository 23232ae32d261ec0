"""Run passes, one on each rank; split those that fail, so that a job fails only for reasons of its own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.errors import OutOfMemory
from trainer_service.engine.distributed.ranks import Ranks
from trainer_service.engine.distributed.sharding import ShardedModel
from trainer_service.engine.memory import out_of_memory_named
from trainer_service.engine.microbatch.oom_splitting import Passes, explain, jobs_of, smaller_passes
from trainer_service.engine.microbatch.runner import PassRunner, PassShare, Result
from trainer_service.engine.model.base_model import PassMode
from trainer_service.engine.model.lora_linear import Routing
from trainer_service.engine.runs.full_run import FullRun
from trainer_service.engine.runs.offload import RunOffloader
from trainer_service.engine.runs.run import EngineRun

_log = logging.getLogger(__name__)


class PassExecutor:
    """Runs passes on the shared model, sharded over `ranks`, and on the models of full-parameter runs."""

    def __init__(
        self,
        shared: ShardedModel,
        routing: Routing,
        mode: PassMode,
        ranks: Ranks,
        offloader: RunOffloader,
        device: torch.device,
        logprob_chunk: int,
    ) -> None:
        self._shared, self._ranks, self._offloader = shared, ranks, offloader
        self._make_runner = partial(PassRunner, mode=mode, device=device, logprob_chunk=logprob_chunk)
        self._runner = self._make_runner(shared, routing)

    def compute(self, passes: Passes, announce: Callable[[Sequence[str]], None]) -> None:
        """Run one pass on each rank, or smaller ones if any fails; a part that cannot be split further fails its job.

        All ranks call this together and split the same passes in the same way.
        """
        jobs = jobs_of(passes)
        if any(job.error is not None for job in jobs):
            return
        announce([job.run_id for job in jobs])
        error = self._try(passes)
        if error is None:
            return
        out_of_memory = isinstance(error, OutOfMemory)
        parts = smaller_passes(passes, out_of_memory=out_of_memory)
        if parts:
            _log.warning("a pass failed and is done in %d parts: %s", len(parts), error)
        elif out_of_memory:
            error = explain(passes, lambda smaller: self._try(smaller, give=False) is None)
        for part in parts:
            self.compute(part, announce)
        if not parts:
            jobs[0].fail(error)

    def bring_in(self, runs: Sequence[EngineRun]) -> None:
        """Load runs into memory on every rank; all ranks call this together. Raises OutOfMemory, DiskFull."""

        def use() -> None:
            with out_of_memory_named():
                self._offloader.use(runs)

        self._ranks.together(use)

    def _try(self, passes: Passes, *, give: bool = True) -> Exception | None:
        """Run passes and return their error, if any. The jobs get the results if `give`; else they are discarded."""
        jobs, own = jobs_of(passes), passes[self._ranks.rank]
        try:
            self.bring_in([job.run for job in jobs])
            work = partial(self._results, own) if own else None
            results = self._shared.run(work, with_gradient=not jobs[0].forward_only)
        except OutOfMemory as error:
            # Drop the traceback: its frames hold memory that the next attempt needs.
            short = OutOfMemory(error.message, field=error.field, metadata=error.metadata)
        except Exception as error:
            return error
        else:
            for result in results or () if give else ():
                result.give()
            return None
        gc.collect()  # Some of those frames are in reference cycles.
        return short

    def _results(self, shares: Sequence[PassShare]) -> list[Result]:
        with out_of_memory_named():
            return self._runner_of(shares[0][0].run).compute(shares)

    def _runner_of(self, run: EngineRun) -> PassRunner:
        """Return the runner of a run's passes: on the run's own model, which is on one rank, or on the shared one."""
        if isinstance(run, FullRun):
            own = ShardedModel(lambda: run.model, Ranks.alone(), run.model.device)
            return self._make_runner(own, Routing())
        return self._runner
