"""An unmodified tinker-cookbook loop on data from this file instead of a hub.

python cookbook_loop.py sl|rl LOG_PATH MODEL TOKENIZER_DIRECTORY STEPS
"""

import sys

import datasets
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.recipes import rl_loop, sl_loop
from transformers import AutoTokenizer

CAPITALS = {
    "Peru": "Lima",
    "France": "Paris",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Cuba": "Havana",
    "Chile": "Santiago",
}


def rows(kind):
    if kind == "sl":
        return [
            {
                "messages": [
                    {"role": "user", "content": f"Capital of {country}?"},
                    {"role": "assistant", "content": capital},
                ]
            }
            for country, capital in list(CAPITALS.items()) * 8
        ]
    # Every answer is the one in the recipe's own example, which a small model likes to repeat.
    return [{"question": f"What is {n} - {n - 3}?", "answer": "It is 3.\n#### 3"} for n in range(4, 28)]


def main():
    kind, log_path, model, tokenizer, steps = sys.argv[1:]
    data = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(kind))})
    datasets.load_dataset = lambda *_: data
    tokenizer_utils.register_tokenizer(model, lambda: AutoTokenizer.from_pretrained(tokenizer))
    shared = {"log_path": log_path, "model_name": model, "lora_rank": 8, "max_steps": int(steps), "save_every": 1}
    if kind == "sl":
        sl_loop.main(sl_loop.Config(**shared, batch_size=6, learning_rate=1e-3))
    else:
        config = {"batch_size": 2, "group_size": 4, "max_tokens": 24, "learning_rate": 1e-4}
        rl_loop.main(rl_loop.Config(**shared, **config, loss_fn="importance_sampling"))


main()
