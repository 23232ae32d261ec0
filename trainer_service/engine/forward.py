"""From a pack of tokens to the log-probabilities of its targets."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_service.engine.base_model import backbone, output_head
from trainer_service.engine.logprobs import target_logprobs
from trainer_service.engine.packing import Pack


class PackLogprobs(nn.Module):
    """A causal LM as the losses see it. All of its weights are used inside `forward`, the output head's too."""

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.model = model
        self._chunk = chunk

    def forward(self, pack: Pack) -> Tensor:
        """Return the logprobs at the pack's counted positions, float32, of the shape of its target tokens."""
        hidden = backbone(self.model)(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            segment_lengths=pack.segment_lengths,
        ).last_hidden_state[0]
        counted = hidden.index_select(0, pack.counted)
        return target_logprobs(output_head(self.model), counted, pack.loss_inputs["target_tokens"], self._chunk)
