"""What the packs of one request come to, on one rank and on all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.types import Datum, ForwardBackwardOutput
from paceline.types.training import Array
from trainer_service.engine import wire
from trainer_service.engine.losses import TokenLoss
from trainer_service.engine.packing import Pack, scatter_logprobs
from trainer_service.engine.ranks import Ranks


@dataclass(slots=True)
class _Sums:
    """Sums over packs."""

    tokens: int = 0
    loss: float = 0.0
    means: dict[str, float] = field(default_factory=dict)
    """Name -> sum over tokens of what is to be averaged."""
    logprobs: dict[int, Array] = field(default_factory=dict)
    """Place of a datum in the request -> its logprobs."""

    def add(self, other: _Sums) -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        for name, total in other.means.items():
            self.means[name] = self.means.get(name, 0.0) + total
        self.logprobs |= other.logprobs


class Tally:
    """Sums over the packs of one request, and the logprobs of its datums."""

    def __init__(self, data: Sequence[Datum]) -> None:
        self._outputs = [np.full(datum.loss_inputs["target_tokens"].shape, np.nan, np.float32) for datum in data]
        self._sums = _Sums()

    @property
    def tokens(self) -> int:
        """Positions that were counted."""
        return self._sums.tokens

    def add(self, pack: Pack, logprobs: Tensor, token_loss: TokenLoss) -> None:
        """Count a pack in."""
        scatter_logprobs(self._outputs, pack, logprobs.cpu().numpy())
        means = {name: values.double().sum().item() for name, values in token_loss.means.items()}
        own = {segment.index: self._outputs[segment.index] for segment in pack.segments}
        self._sums.add(_Sums(token_loss.loss.numel(), token_loss.loss.double().sum().item(), means, own))

    def pool(self, ranks: Ranks) -> None:
        """Count in what the other ranks counted, in the same order on each of them."""
        if ranks.size == 1:
            return
        shares = ranks.gather(wire.encode(self._sums))
        self._sums = _Sums()
        for share in shares:
            self._sums.add(wire.decode(share, _Sums))
        for index, values in self._sums.logprobs.items():
            self._outputs[index] = values

    def output(self) -> ForwardBackwardOutput:
        """Return the logprobs, and metrics named name:reduction. Means over no tokens are left out."""
        sums = self._sums
        means = {f"{name}:mean": total / sums.tokens for name, total in sums.means.items()}
        metrics = {"loss:sum": sums.loss, "tokens:sum": float(sums.tokens), **means}
        return ForwardBackwardOutput([{"logprobs": values} for values in self._outputs], metrics)
