"""Score sampled sequences with the trainer's engine at the version stamped on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bench.publish.times import PROMPT
from paceline.types import Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

_RUN = "scored"


@dataclass(frozen=True)
class Sampled:
    """One sequence after `PROMPT`."""

    run: str
    version: int
    tokens: list[int]
    logprobs: list[float]


class Scorer:
    """The trainer's engine, with the weights of one version at a time."""

    def __init__(self, model: Path, dtype: Literal["float32", "bfloat16"], rank: int) -> None:
        torch.set_num_threads(1)
        self._engine = PeftEngine(EngineOptions(str(model), model.name, dtype=dtype))
        self._engine.create_run(_RUN, LoraConfig(rank))

    def differences(self, samples: Iterable[Sampled], find: Callable[[str, int], Path]) -> np.ndarray[tuple[int]]:
        """Return |difference| of the log-probability of every token. `find` returns a version's PEFT directory."""
        versions = defaultdict(list)
        for sample in samples:
            versions[sample.run, sample.version].append(sample)
        found = [np.zeros(0)]
        for key, sequences in versions.items():
            self._engine.load_state(_RUN, find(*key), with_optimizer=False)
            data = [Datum.from_completion(PROMPT, sequence.tokens) for sequence in sequences]
            output = self._engine.forward_backward(_RUN, data, ForwardBackwardSpec("cross_entropy", forward_only=True))
            for sequence, scored in zip(sequences, output.loss_fn_outputs, strict=True):
                found.append(np.abs(scored["logprobs"][len(PROMPT) - 1 :] - np.array(sequence.logprobs)))
        return np.concatenate(found)
