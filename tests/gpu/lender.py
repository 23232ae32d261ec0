"""A process that lends a model's weights on the GPU, as the sampler does; `python lender.py MODEL DIRECTORY`.

It prints "lent" when the weights are lent, and then the float64 sum of all weights for each line that it reads.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline.base_model.weight_sharing import claim
from sampler_service.engine.vllm.worker.weight_export import Places, hugging_face_views


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(model_path: str, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to("cuda")
    claim(directory)
    Places().manifest(model, "tiny", writable=False).write(directory)
    say("lent")
    for _ in sys.stdin:
        say(sum(float(weight.double().sum()) for _, weight in hugging_face_views(model)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
