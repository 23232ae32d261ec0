"""Run one forward and backward pass through the base model, over segments of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from paceline.types.training import Array
from trainer_service.engine.distributed.sharding import ShardedModel
from trainer_service.engine.loss.losses import TokenLoss
from trainer_service.engine.loss.specs import TEMPERATURE
from trainer_service.engine.microbatch.microbatch import ForwardBackwardJob, Totals
from trainer_service.engine.microbatch.packing import Pack, PackedSegment
from trainer_service.engine.model.base_model import PassMode, hidden_states, output_head, own_logits
from trainer_service.engine.model.logprobs import chosen_logprobs, has_adapter, target_logprobs
from trainer_service.engine.model.lora_linear import Routing, Span

PassShare = tuple[ForwardBackwardJob, Sequence[PackedSegment]]
"""A job and its segments in a pass."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A job's part of a pass: consecutive rows."""

    job: ForwardBackwardJob
    pack: Pack
    start: int
    """The job's first row in the pass."""


@dataclass(frozen=True, slots=True)
class Result:
    """A job's results of a pass; on the host, so that `give` cannot fail. `gradients` is empty if none are computed."""

    job: ForwardBackwardJob
    pack: Pack
    logprobs: Array
    totals: Totals
    gradients: list[Tensor]

    def give(self) -> None:
        """Add the results to the job."""
        self.job.add(self.pack, self.logprobs, self.totals, self.gradients)


class PassRunner:
    """Computes passes on a base model; `routing` assigns rows to its adapters."""

    def __init__(
        self, sharded: ShardedModel, routing: Routing, mode: PassMode, device: torch.device, logprob_chunk: int
    ) -> None:
        self._sharded, self._model, self._mode = sharded, sharded.model, mode
        self._routing, self._device = routing, device
        self._chunk = logprob_chunk

    def compute(self, shares: Sequence[PassShare]) -> list[Result]:
        """Compute the shares together. Either all jobs are forward_only or none is.

        Each job has its own loss, and one backward pass serves all of them; a run's rows affect only its own gradient.
        """
        rows = _side_by_side([(job, job.batch.pack(segments, self._device)) for job, segments in shares])
        with self._routing.over([_span(part, part.start, part.pack.segment_lengths) for part in rows]):
            with torch.set_grad_enabled(not shares[0][0].forward_only):
                logprobs = self._logprobs(rows)
                losses = [part.job.loss(own, part.pack) for part, own in zip(rows, logprobs, strict=True)]
            gradients = _gradients(rows, losses, self._sharded.entrances)
        return [
            Result(part.job, part.pack, own.detach().cpu().numpy(), Totals.of(loss), gradient)
            for part, own, loss, gradient in zip(rows, logprobs, losses, gradients, strict=True)
        ]

    def _logprobs(self, rows: Sequence[_Rows]) -> list[Tensor]:
        groups = self._with_heads_alike(rows)
        wholes = self._sharded.inside(partial(self._forward, rows, groups))
        result: dict[str, Tensor] = {}
        for group, whole in zip(groups, wholes, strict=True):
            parts = torch.split(whole, [len(part.pack.counted) for part in group])
            result |= {part.job.run_id: own for part, own in zip(group, parts, strict=True)}
        return [result[part.job.run_id] for part in rows]

    def _forward(self, rows: Sequence[_Rows], groups: Sequence[Sequence[_Rows]]) -> list[Tensor]:
        input_ids = torch.cat([part.pack.input_ids for part in rows], dim=1)
        if self._mode.own_logits:
            logits = own_logits(self._model, input_ids)
            return [
                chosen_logprobs(
                    logits.index_select(0, part.pack.counted + part.start),
                    part.pack.loss_inputs["target_tokens"],
                    part.pack.loss_inputs.get(TEMPERATURE),
                )
                for (part,) in groups
            ]
        hidden = hidden_states(
            self._model,
            self._mode,
            input_ids,
            torch.cat([part.pack.position_ids for part in rows], dim=1),
            tuple(length for part in rows for length in part.pack.segment_lengths),
        ).squeeze(0)
        return [self._head(hidden, group) for group in groups]

    def _head(self, hidden: Tensor, rows: Sequence[_Rows]) -> Tensor:
        counted = hidden.index_select(0, torch.cat([part.pack.counted + part.start for part in rows]))
        targets = torch.cat([part.pack.loss_inputs["target_tokens"] for part in rows])
        lengths = [len(part.pack.counted) for part in rows]
        starts = [0, *accumulate(lengths)]
        spans = [
            _span(part, start, tuple(len(segment.counted) for segment in part.pack.segments))
            for part, start in zip(rows, starts, strict=False)
        ]
        temperatures = _temperatures(rows)
        return target_logprobs(output_head(self._model), counted, targets, self._chunk, spans, temperatures)

    def _with_heads_alike(self, rows: Sequence[_Rows]) -> list[list[_Rows]]:
        """Group the rows that the head can compute at once: equal targets per position, all with an adapter or none."""
        head = output_head(self._model)
        groups: dict[tuple[object, ...], list[_Rows]] = {}
        for part in rows:
            width = part.pack.loss_inputs["target_tokens"].shape[1:]
            groups.setdefault((has_adapter(head, part.job.run_id), width), []).append(part)
        return list(groups.values())


def _temperatures(rows: Sequence[_Rows]) -> Tensor | None:
    """Return each position's temperature; None if no job has any."""
    given = [part.pack.loss_inputs.get(TEMPERATURE) for part in rows]
    if all(each is None for each in given):
        return None
    ones = [torch.ones_like(part.pack.weights) for part in rows]
    return torch.cat([one if each is None else each for each, one in zip(given, ones, strict=True)])


def _side_by_side(packs: Sequence[tuple[ForwardBackwardJob, Pack]]) -> list[_Rows]:
    starts = [0, *accumulate(sum(pack.segment_lengths) for _, pack in packs)]
    return [_Rows(job, pack, start) for (job, pack), start in zip(packs, starts, strict=False)]


def _span(part: _Rows, start: int, lengths: Sequence[int]) -> Span:
    indices = (segment.index for segment in part.pack.segments)
    segments = tuple(zip(indices, lengths, strict=True))
    return Span(part.job.run_id, start, start + sum(lengths), segments, part.job.seed)


def _gradients(rows: Sequence[_Rows], losses: Sequence[TokenLoss], entrances: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return, for each job, the gradient of its loss for each of its run's weights; None for weights without one.

    The backward pass reaches back to `entrances`, although their gradients are not used.
    """
    if rows[0].job.forward_only:
        return [[] for _ in rows]
    # Gradients are returned as values and added once all exist: a failure half-way leaves no run with a partial one.
    weights = [list(part.job.run.parameters.values()) for part in rows]
    inputs = [*(weight for own in weights for weight in own), *entrances]
    flat = iter(torch.autograd.grad([loss.loss.sum() for loss in losses], inputs, allow_unused=True))
    # Gradients of bfloat16 weights are bfloat16; sums are float32.
    return [[None if (each := next(flat)) is None else each.float() for _ in own] for own in weights]
