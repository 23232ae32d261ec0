"""The stock arm of `python -m bench.parity`: vLLM samples, transformers scores, both in bfloat16, on the base model.

python -m bench.parity.stock MODEL PROMPT...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COUNTRIES = ("Peru", "Norway", "Japan", "Kenya", "Portugal", "Chile", "Greece", "Cuba")
PROMPTS = [f"Country: {country}\nCapital:" for country in COUNTRIES]
FLOAT32_BUDGET = 1e-5
"""Mean |difference| between trainer and sampler."""
BFLOAT16_FACTOR = 1.25
"""Largest ratio of our difference to the stock difference."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def measure_stock(model: Path) -> float:
    """Return the mean |difference| of stock vLLM and stock transformers, measured in a separate process."""
    command = [sys.executable, "-m", "bench.parity.stock", str(model), *PROMPTS]
    done = subprocess.run(command, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    # vLLM prints to standard output too.
    answer = next(line for line in done.stdout.splitlines() if line.startswith('{"difference"'))
    return float(json.loads(answer)["difference"])


def main(model_path: str, prompts: list[str]) -> None:
    """Print the mean |difference| as JSON."""
    import torch  # noqa: PLC0415 - only in its own process
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    engine = LLM(
        model_path, dtype="bfloat16", enforce_eager=True, logprobs_mode="processed_logprobs", max_model_len=512
    )
    params = SamplingParams(n=4, max_tokens=32, ignore_eos=True, logprobs=0)
    requests = engine.generate(prompts, params)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    differences = []
    for request in requests:
        prompt: Any = request.prompt_token_ids
        for completion in request.outputs:
            tokens = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
            scored = logits.log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
            logprobs: Any = completion.logprobs
            sampled = torch.tensor(
                [step[token].logprob for step, token in zip(logprobs, completion.token_ids, strict=True)]
            )
            differences.append((scored - sampled).abs())
    print(json.dumps({"difference": torch.cat(differences).mean().item()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
