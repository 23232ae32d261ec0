"""Measure how closely trainer and sampler agree on log-probabilities, beside stock transformers and vLLM.

    make bench-parity

Our arm, in float32 and in bfloat16: train a few steps, publish, sample from the new version, and compare the sampler's
log-probabilities with the trainer's at that version and with those of the previous version. The stock arm: vLLM samples
from the base model in bfloat16 and transformers scores the same tokens in bfloat16. All in one run, on the embedded
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from make_model import default_directory, make_model

import paceline
from bench.budgets import budget
from bench.parity.stock import BFLOAT16_FACTOR, FLOAT32_BUDGET, PROMPTS, measure_stock
from paceline import AdamParams, Datum, SamplingParams
from paceline.up.local import local_services
from paceline.up.plan import UpOptions

PARAMS = SamplingParams(max_tokens=32, seed=0, ignore_eos=True)
NUM_SAMPLES = 4


@dataclass(frozen=True)
class Parity:
    """Mean |difference| of log-probabilities over all sampled tokens."""

    same_version: float
    previous_version: float
    tokens: int


def measure_ours(model: Path, dtype: str) -> Parity:
    """Measure through the three services."""
    with TemporaryDirectory() as state:
        options = UpOptions(str(model), state=state, address="127.0.0.1:50450", dtype=dtype, max_lora_rank=16)
        with (
            local_services(options, Path(state) / "services.log") as services,
            paceline.ServiceClient(services.address, services.api_key) as client,
        ):
            return compare_versions(client)


def compare_versions(client: paceline.ServiceClient) -> Parity:
    """Train, publish, sample, and score each sample with the trainer and with the previous version."""
    training = client.create_lora_training_client(rank=16, seed=1)
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    previous = training.save_weights_and_get_sampling_client()
    answer = tokenizer.encode(" a city by the sea", add_special_tokens=False)
    for _ in range(3):
        training.forward_backward([Datum.from_completion(prompt, answer, weight=1 / 8) for prompt in prompts])
        training.optim_step(AdamParams(learning_rate=1e-3))
    current = training.save_weights_and_get_sampling_client()
    futures = [current.sample(prompt, NUM_SAMPLES, PARAMS) for prompt in prompts]
    same, stale = [], []
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            output = training.forward([Datum.from_completion(prompt, sequence.tokens.tolist())]).result()
            ours = output.loss_fn_outputs[0]["logprobs"][len(prompt) - 1 :]
            old = previous.compute_logprobs([*prompt, *sequence.tokens]).result().logprobs[len(prompt) :]
            same.append(np.abs(ours - sequence.logprobs))
            stale.append(np.abs(ours - old))
    return Parity(float(np.concatenate(same).mean()), float(np.concatenate(stale).mean()), sum(map(len, same)))


def main() -> None:
    """Run the three arms and print the budgets."""
    model = make_model(default_directory())
    exact, fast, stock = measure_ours(model, "float32"), measure_ours(model, "bfloat16"), measure_stock(model)
    for name, parity in (("float32", exact), ("bfloat16", fast)):
        print(f"ours {name}: same version {parity.same_version:.2e}, previous version {parity.previous_version:.2e} "
              f"({parity.tokens} tokens)")  # fmt: skip
    print(f"stock bfloat16, base model: {stock:.2e}")
    budget("parity float32", exact.same_version, FLOAT32_BUDGET, at_most=True)
    budget("parity bfloat16", fast.same_version, BFLOAT16_FACTOR * stock, at_most=True)


if __name__ == "__main__":
    main()
