"""The difference between stock vLLM and stock transformers, which bounds that of trainer and sampler on a machine.

`python stock_libraries.py MODEL DTYPE PROMPT` prints the mean |difference of log-probabilities| of the tokens that
vLLM samples. It runs in its own process, so that its memory is freed afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SAMPLES, _TOKENS = 16, 16


def bound(model: Path, prompt: Sequence[int], dtype: str = "bfloat16") -> float:
    """Return twice the difference of the stock libraries, because ours may be measured on other tokens."""
    program = [sys.executable, __file__, str(model), dtype, json.dumps(list(prompt))]
    # vLLM's engine in the program's own process: one of its own would outlive the program, and hold the pipe open.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return 2 * float(done.stdout.splitlines()[-1])


def main(model: str, dtype: str, prompt: list[int]) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=128,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    params = SamplingParams(n=_SAMPLES, max_tokens=_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
    differences = []
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        theirs = torch.tensor([row[token].logprob for token, row in zip(tokens, completion.logprobs, strict=True)])
        with torch.inference_mode():
            logits = stock(torch.tensor([[*prompt, *tokens]], device=device)).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0].cpu()
        differences.append((ours - theirs).abs().mean())
    sys.stdout.write(f"\n{torch.stack(differences).mean().item()}\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for vLLM's threads and workers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
