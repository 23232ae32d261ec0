"""Supervised fine-tuning: teach the model to answer in the style of a few examples, then ask it a question.

    python examples/sft_loop.py [--steps 12] [--name mine]

If this script is killed, start it again: it finds its run by name and continues at the step that the run has.

Needs a running gateway: `make up` in another terminal prints the two variables to export.
"""

from __future__ import annotations

import argparse

import paceline
from paceline import AdamParams, Datum, SamplingParams
from paceline.recipes.runs import attach, until_superseded

EXAMPLES = [
    ("What does a trainer do?", "It turns rewards into gradients, and gradients into better weights."),
    ("What does a sampler do?", "It turns weights into tokens, as many and as soon as it can."),
    ("What does a gateway do?", "It turns strangers away, and shows friends the shortest way."),
    ("What does a version do?", "It stays what it is, and says so with every token."),
]


def main() -> None:
    """Train, then sample from the result."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--name", default="sft_loop", help="of the run; one that exists is continued")
    options = parser.parse_args()

    with until_superseded(), paceline.ServiceClient() as service:
        settings = f"learning rate {options.learning_rate}"
        training = attach(service, options.name, settings, print) or service.create_lora_training_client(
            rank=8, user_metadata={"name": options.name, "settings": settings}
        )
        tokenizer = training.get_tokenizer()

        def prompt_tokens(question: str) -> list[int]:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return tokens

        # A datum is already shifted: position i predicts target i, and only the answer's positions count. The loss is
        # a sum; the weight turns it into a mean over the batch's answers.
        data = []
        for question, answer in EXAMPLES:
            completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            weight = 1 / (len(completion) * len(EXAMPLES))
            data.append(Datum.from_completion(prompt_tokens(question), completion, weight=weight))

        for step in range(training.get_info().step + 1, options.steps + 1):
            # Both are issued before either is awaited, so the trainer does not pause between them.
            passed = training.forward_backward(data, "cross_entropy")
            update = training.optim_step(AdamParams(learning_rate=options.learning_rate), only_if_succeeded=passed)
            print(f"step {step:3}   loss {passed.result().metrics['loss:sum']:.3f}   "
                  f"gradient {update.result().grad_norm:.2f}   {update.result().milliseconds:.1f} ms")  # fmt: skip

        sampling = training.save_weights_and_get_sampling_client()
        question = EXAMPLES[0][0]
        reply = sampling.sample(prompt_tokens(question), 1, SamplingParams(max_tokens=32, temperature=0)).result()
        print(f"\n{question}\n{tokenizer.decode(reply.sequences[0].tokens, skip_special_tokens=True)}")
        print(f"(version {reply.model.version}, blake3 {reply.model.blake3[:12]})")
        service.delete_run(training.run_id)  # a tenant may have 64 runs; save what is to stay as a checkpoint first


if __name__ == "__main__":
    main()
