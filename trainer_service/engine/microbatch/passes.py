"""Run passes, one on each rank, and sum their losses; split those that fail, so that a job fails by itself alone."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import OutOfMemory, PacelineError
from paceline.types.training import Array
from trainer_service.engine.distributed.ranks import Ranks, convert_memory_errors
from trainer_service.engine.distributed.sharding import ShardedModel
from trainer_service.engine.loss.losses import LOSSES, TokenLoss
from trainer_service.engine.microbatch.job import ForwardBackwardJob, Pack, PackedSegment, Totals
from trainer_service.engine.microbatch.scheduler import Scheduler
from trainer_service.engine.model.base_model import PassMode, hidden_states, output_head, own_logits
from trainer_service.engine.model.logprobs import chosen_logprobs, has_adapter, target_logprobs
from trainer_service.engine.model.lora_linear import Routing, Span
from trainer_service.engine.runs.full_run import FullRun
from trainer_service.engine.runs.offload import RunOffloader
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine_link.loss_specs import TEMPERATURE
from trainer_service.engine_link.options import EngineOptions

PassShare = tuple[ForwardBackwardJob, Sequence[PackedSegment]]
"""A job and its segments in a pass."""

Passes = Sequence[Sequence[PassShare]]
"""One pass for each rank, run at the same time; it may be empty for some ranks."""

_log = logging.getLogger(__name__)


class PassExecutor:
    """Runs passes on the shared model, sharded over `ranks`, and on the models of full-parameter runs."""

    def __init__(
        self,
        shared: ShardedModel,
        routing: Routing,
        mode: PassMode,
        options: EngineOptions,
        ranks: Ranks,
        offloader: RunOffloader,
        device: torch.device,
    ) -> None:
        """Run passes in `mode`; `routing` assigns rows to the adapters of the `shared` model."""
        self._shared, self._routing, self._mode = shared, routing, mode
        self._ranks, self._offloader, self._device = ranks, offloader, device
        self._chunk = options.logprob_chunk
        self.scheduler: Scheduler[ForwardBackwardJob] = Scheduler(
            options.pack_tokens if mode.is_packed else 1,
            joint=options.joint_passes and mode.is_packed,
            ranks=ranks.size,
        )

    def advance(
        self, jobs: Sequence[ForwardBackwardJob], announce: Callable[[Sequence[str]], None]
    ) -> list[ForwardBackwardJob]:
        """Run one pass on each rank, with segments of the jobs; return the jobs that are done, including failed ones.

        Before a pass is computed, `announce` gets the runs that take part in it. All ranks call this together.
        """
        fitting = self._offloader.fitting([job.run for job in jobs])
        passes = self.scheduler.next_passes(jobs[:fitting])
        if any(passes):
            self._compute(passes, announce)
        done = [job for job in jobs if not job.waiting]
        for job in done:
            self._finish(job)
        return done

    def load_runs(self, runs: Sequence[EngineRun]) -> None:
        """Load runs into memory on every rank; all ranks call this together. Raises OutOfMemory, DiskFull."""
        if self._ranks.size == 1:
            self.load_on_this_rank(runs)
        else:
            self._ranks.together(partial(self.load_on_this_rank, runs))

    def load_on_this_rank(self, runs: Sequence[EngineRun]) -> None:
        """Load runs into memory on this rank only, which is enough for commands that only read."""
        with convert_memory_errors():
            self._offloader.use(runs)

    def _compute(self, passes: Passes, announce: Callable[[Sequence[str]], None]) -> None:
        """Run one pass on each rank, or smaller ones if any fails; a part that cannot be split further fails its job.

        All ranks split the same passes in the same way.
        """
        jobs = _jobs_of(passes)
        if any(job.error is not None for job in jobs):
            return
        announce([job.run_id for job in jobs])
        error = self._try(passes)
        if error is None:
            return
        out_of_memory = isinstance(error, OutOfMemory)
        parts = _smaller_passes(passes, out_of_memory=out_of_memory)
        if not parts:
            jobs[0].fail(self._explain(passes) if out_of_memory else error)
            return
        _log.warning("a pass failed; repeating it in %d parts: %s", len(parts), error)
        for part in parts:
            self._compute(part, announce)

    def _try(self, passes: Passes, *, deliver: bool = True) -> Exception | None:
        """Run passes and return their error, if any. The jobs get the results if `deliver`; else they are discarded."""
        jobs, own = _jobs_of(passes), passes[self._ranks.rank]
        try:
            self.load_runs([job.run for job in jobs])
            if self._ranks.size == 1:
                results: list[_Result] | None = self._run_pass(own)
            else:
                work = partial(self._run_pass, own) if own else None
                results = self._shared.run(work, with_gradient=not jobs[0].forward_only)
        except OutOfMemory as error:
            # Drop the traceback: its frames hold memory that the next attempt needs.
            short = OutOfMemory(error.message, field=error.field, metadata=error.metadata)
        except Exception as error:
            return error
        else:
            if deliver:
                for result in results or ():
                    result.job.add(result.pack, result.logprobs, result.totals, result.gradients)
            return None
        gc.collect()  # Some of those frames are in reference cycles.
        return short

    def _explain(self, passes: Passes) -> OutOfMemory:
        """Find by halving how many tokens of the only sequence, which does not fit, would fit."""
        ((rank, (job, (segment,))),) = ((rank, share) for rank, shares in enumerate(passes) for share in shares)
        length = segment.length // 2
        while length:
            shorter = _only(passes, rank, [(job, [_first(segment, length)])])
            if self._try(shorter, deliver=False) is None:
                break
            length //= 2
        hint = f"its first {length} would fit" if length else "not even one token fits; free memory, or train less"
        return OutOfMemory(
            f"the sequence's {segment.length} tokens do not fit into the engine's memory; {hint}.",
            field=f"data[{segment.index}]",
            metadata={"tokens": str(segment.length), "fitting_tokens": str(length)},
        )

    def _finish(self, job: ForwardBackwardJob) -> None:
        try:
            if job.error is None:
                self.load_runs([job.run])
                if self._ranks.size > 1:
                    job.combine_ranks(self._ranks)
                with convert_memory_errors():
                    job.finish()
        except PacelineError as error:
            job.fail(error)

    def _run_pass(self, shares: Sequence[PassShare]) -> list[_Result]:
        """Run a forward and backward pass. Either all jobs are forward_only or none is.

        Each job has its own loss, and one backward pass serves all of them; a run's rows affect only its own gradient.
        """
        with convert_memory_errors():
            packs = [job.batch.pack(segments, self._device) for job, segments in shares]
            starts = accumulate((sum(pack.segment_lengths) for pack in packs), initial=0)
            rows = [_Rows(job, pack, start) for (job, _), pack, start in zip(shares, packs, starts, strict=False)]
            run = shares[0][0].run
            model = run.model if isinstance(run, FullRun) else self._shared.model
            with self._routing.over([_span(part, part.start, part.pack.segment_lengths) for part in rows]):
                with torch.set_grad_enabled(not shares[0][0].forward_only):
                    logprobs = self._logprobs(model, rows)
                    losses = [_loss(part, own) for part, own in zip(rows, logprobs, strict=True)]
                gradients = _gradients(rows, losses, self._shared.layer_inputs)
            return [
                _Result(part.job, part.pack, own.detach().cpu().numpy(), _totals(loss, part.pack), gradient)
                for part, own, loss, gradient in zip(rows, logprobs, losses, gradients, strict=True)
            ]

    def _logprobs(self, model: PreTrainedModel, rows: Sequence[_Rows]) -> list[Tensor]:
        head = output_head(model)
        groups = _head_groups(head, rows)
        forward = partial(self._forward, model, head, rows, groups)
        wholes = forward() if self._ranks.size == 1 else self._shared.run_root(forward)
        result: dict[str, Tensor] = {}
        for group, whole in zip(groups, wholes, strict=True):
            parts = torch.split(whole, [len(part.pack.counted) for part in group])
            result |= {part.job.run_id: own for part, own in zip(group, parts, strict=True)}
        return [result[part.job.run_id] for part in rows]

    def _forward(
        self, model: PreTrainedModel, head: nn.Module, rows: Sequence[_Rows], groups: Sequence[Sequence[_Rows]]
    ) -> list[Tensor]:
        input_ids = torch.cat([part.pack.input_ids for part in rows], dim=1)
        if self._mode.own_logits:
            logits = own_logits(model, input_ids)
            return [
                chosen_logprobs(
                    logits.index_select(0, part.pack.counted + part.start),
                    part.pack.loss_fn_inputs["target_tokens"],
                    part.pack.loss_fn_inputs.get(TEMPERATURE),
                )
                for (part,) in groups
            ]
        hidden = hidden_states(
            model,
            self._mode,
            input_ids,
            torch.cat([part.pack.position_ids for part in rows], dim=1),
            tuple(length for part in rows for length in part.pack.segment_lengths),
        ).squeeze(0)
        return [self._target_logprobs(head, hidden, group) for group in groups]

    def _target_logprobs(self, head: nn.Module, hidden: Tensor, rows: Sequence[_Rows]) -> Tensor:
        counted = hidden.index_select(0, torch.cat([part.pack.counted + part.start for part in rows]))
        targets = torch.cat([part.pack.loss_fn_inputs["target_tokens"] for part in rows])
        starts = accumulate((len(part.pack.counted) for part in rows), initial=0)
        spans = [
            _span(part, start, tuple(len(segment.counted) for segment in part.pack.segments))
            for part, start in zip(rows, starts, strict=False)
        ]
        return target_logprobs(head, counted, targets, self._chunk, spans, _temperatures(rows))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A job's part of a pass: consecutive rows."""

    job: ForwardBackwardJob
    pack: Pack
    start: int
    """The job's first row in the pass."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A job's results of a pass; on the host, so that delivering them cannot fail."""

    job: ForwardBackwardJob
    pack: Pack
    logprobs: Array
    totals: Totals
    gradients: list[Tensor]
    """Empty if none are computed."""


def _head_groups(head: nn.Module, rows: Sequence[_Rows]) -> list[list[_Rows]]:
    """Group the rows that the head can compute at once: equal targets per position, all with an adapter or none."""
    groups: dict[tuple[object, ...], list[_Rows]] = {}
    for part in rows:
        width = part.pack.loss_fn_inputs["target_tokens"].shape[1:]
        groups.setdefault((has_adapter(head, part.job.run_id), width), []).append(part)
    return list(groups.values())


def _temperatures(rows: Sequence[_Rows]) -> Tensor | None:
    """Return each position's temperature; None if no job has any."""
    given = [part.pack.loss_fn_inputs.get(TEMPERATURE) for part in rows]
    if all(each is None for each in given):
        return None
    ones = [torch.ones_like(part.pack.weights) for part in rows]
    return torch.cat([one if each is None else each for each, one in zip(given, ones, strict=True)])


def _span(part: _Rows, start: int, lengths: Sequence[int]) -> Span:
    indices = (segment.index for segment in part.pack.segments)
    segments = tuple(zip(indices, lengths, strict=True))
    return Span(part.job.run_id, start, start + sum(lengths), segments, part.job.seed)


def _loss(part: _Rows, logprobs: Tensor) -> TokenLoss:
    """Compute the weighted loss at a pack's counted positions."""
    spec, pack = part.job.spec, part.pack
    result = LOSSES[spec.loss_fn](logprobs, pack.loss_fn_inputs, spec.loss_fn_config)
    return replace(result, loss=result.loss * pack.weights)


def _totals(token_loss: TokenLoss, pack: Pack) -> Totals:
    """Sum over the positions of one pack."""
    loss = token_loss.loss.detach()
    positions = int(loss.isfinite().logical_not().sum())
    sums, advantage_sums = (
        {name: values.double().sum().item() for name, values in means.items()}
        for means in (token_loss.means, token_loss.advantage_means)
    )
    return Totals(
        loss.numel(),
        positions,
        loss=loss.double().sum().item(),
        sums=sums,
        with_advantage=int(pack.loss_fn_inputs["advantages"].count_nonzero()) if advantage_sums else 0,
        advantage_sums=advantage_sums,
    )


def _gradients(
    rows: Sequence[_Rows], losses: Sequence[TokenLoss], layer_inputs: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return, for each job, the gradient of its loss for each of its run's weights; None for weights without one.

    The backward pass reaches back to `layer_inputs`, although their gradients are not used.
    """
    if rows[0].job.forward_only:
        return [[] for _ in rows]
    # Gradients are returned as values and added once all exist: a failure half-way leaves no run with a partial one.
    weights = [list(part.job.run.parameters.values()) for part in rows]
    inputs = [*(weight for own in weights for weight in own), *layer_inputs]
    flat = iter(torch.autograd.grad([loss.loss.sum() for loss in losses], inputs, allow_unused=True))
    # Gradients of bfloat16 weights are bfloat16; sums are float32. Some are views with strides of their own, which
    # torch's fused AdamW on a CPU ignores.
    return [[None if (each := next(flat)) is None else each.float().contiguous() for _ in own] for own in weights]


def _jobs_of(passes: Passes) -> list[ForwardBackwardJob]:
    """Return the distinct jobs that have a share."""
    return list({job.run_id: job for shares in passes for job, _ in shares}.values())


def _smaller_passes(passes: Passes, *, out_of_memory: bool) -> list[Passes]:
    """Split failed passes: those of several runs by run, others into halves if they ran out of memory.

    Returns an empty list if nothing can be split.
    """
    jobs = _jobs_of(passes)
    # Runs are separated after any error: none may fail because of another.
    if len(jobs) > 1:
        return [[[share for share in shares if share[0] is job] for shares in passes] for job in jobs]
    counts = [len(segments) for shares in passes for _, segments in shares]
    if not out_of_memory or sum(counts) == 1:
        return []
    if max(counts) > 1:
        return [[_half(shares, second=second) for shares in passes] for second in (False, True)]
    # Each rank has one segment, so they take turns.
    return [_only(passes, rank, shares) for rank, shares in enumerate(passes) if shares]


def _only(passes: Passes, rank: int, shares: Sequence[PassShare]) -> Passes:
    """Return passes that are empty for all ranks but one."""
    return [shares if index == rank else [] for index in range(len(passes))]


def _half(shares: Sequence[PassShare], *, second: bool) -> Sequence[PassShare]:
    middles = [len(segments) // 2 for _, segments in shares]
    halves = [
        (job, segments[middle:] if second else segments[:middle])
        for (job, segments), middle in zip(shares, middles, strict=True)
    ]
    return [share for share in halves if share[1]]


def _first(segment: PackedSegment, length: int) -> PackedSegment:
    """Cut a segment after `length` tokens; if none of them counts, count the first token."""
    counted = segment.counted[segment.counted < length]
    return replace(segment, length=length, counted=counted if len(counted) else segment.counted[:1] * 0)
