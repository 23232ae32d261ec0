"""Trainer and sampler agree on the log-probabilities of sampled tokens, in float32, at every temperature."""

from __future__ import annotations

import numpy as np
import pytest
from support.models.engine_cases import warmed
from support.models.formulas import log_softmax
from support.models.tiny_models import VOCAB_SIZE
from support.stacks.sampler_contract import IDS, PROMPT, ask, complete

from paceline.types import Datum, ForwardBackwardSpec, LoraConfig
from sampler_service.engine.protocol import Adapter
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def trainer(model_path):
    """Return a trainer with an untrained run and a trained one."""
    trainer = PeftEngine(EngineOptions(str(model_path), "tiny"))
    trainer.create_run("untrained", LoraConfig(rank=4))
    trainer.create_run("trained", LoraConfig(rank=8))
    return warmed(trainer, "trained")


def predictions(trainer: PeftEngine, run_id: str, tokens: list[int]) -> np.ndarray:
    """Return the trainer's log-probability of every vocabulary token at each position but the last: [N - 1, V]."""
    everything = np.tile(np.arange(VOCAB_SIZE), (len(tokens) - 1, 1))
    inputs = {"target_tokens": everything, "weights": np.ones(everything.shape, np.float32)}
    datum = Datum(np.array(tokens[:-1], np.int32), inputs)
    output = trainer.forward_backward(run_id, [datum], ForwardBackwardSpec("cross_entropy", forward_only=True))
    return output.loss_fn_outputs[0]["logprobs"].astype(np.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("run_id", ["untrained", "trained"])
async def test_the_sampler_s_logprobs_are_the_trainer_s_at_the_temperature_of_sampling(
    engine, trainer, tmp_path, run_id, temperature
):
    adapter = None
    if run_id == "trained":
        adapter = Adapter(next(IDS), f"run@{tmp_path.name}", tmp_path)
        trainer.save_adapter(run_id, tmp_path)
        await engine.add_adapter(adapter)
    request = ask(max_tokens=24, seed=3, temperature=temperature, num_samples=4, adapter=adapter, ignore_eos=True)
    differences = []
    for completion in await complete(engine, request):
        tokens = PROMPT + completion.tokens
        rows = predictions(trainer, run_id, tokens)
        sampled = log_softmax(rows[len(PROMPT) - 1 :] / temperature)[range(24), completion.tokens]
        differences.append(sampled - completion.logprobs)
        scored = await engine.compute_logprobs(tokens, adapter, "")
        differences.append(rows[range(len(rows)), tokens[1:]] - scored[1:])
    assert np.abs(np.concatenate(differences)).mean() < 1e-5
    assert np.abs(np.concatenate(differences)).max() < 1e-4
    if adapter:
        base = await engine.compute_logprobs(tokens, None, "")
        assert np.abs(base[1:] - scored[1:]).mean() > 1e-2
        await engine.remove_adapter(adapter)
