"""Log-probabilities of sampled tokens under a version, by transformers and PEFT."""

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


class Scorer:
    """A second implementation of what the sampler computes."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def score(self, adapter: Path, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the float32 log-probability of each of `tokens`, given `prompt` and the tokens before it."""
        base = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter).eval()
        every = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
        with torch.no_grad():
            logprobs = model(every[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(every) - 1)
        return logprobs[places, every[len(prompt) :]].numpy()
