"""Stream tokens as they are sampled; stop at any time.

    python examples/stream_tokens.py "Why is the sky blue?" [--max-tokens 64]

Needs a running gateway: `make up` in another terminal prints the two variables to export.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import paceline
from paceline import SamplingParams


def main() -> None:
    """Stream one completion of the base model."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "question", nargs="?", default="Why is the sky blue? Answer in one sentence.", help="what to ask"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of the answer")
    options = parser.parse_args()

    with paceline.ServiceClient() as service:
        sampling = service.create_sampling_client()
        tokenizer = sampling.get_tokenizer()
        messages = [{"role": "user", "content": options.question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)

        start, first, shown, answer = perf_counter(), 0.0, 0, ""
        tokens: list[int] = []
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.7)
        ended = "nothing"
        # Leaving this loop early, by break or Ctrl-C, cancels the request, and the sampler stops working on it.
        try:
            for delta in sampling.sample_stream(prompt, sampling_params=params):
                first = first or perf_counter() - start
                tokens += delta.tokens
                answer = str(tokenizer.decode(tokens, skip_special_tokens=True))
                if not answer.endswith("\N{REPLACEMENT CHARACTER}"):  # else the rest of a character has yet to come
                    print(answer[shown:], end="", flush=True)
                    shown = len(answer)
                if delta.stop_reason:
                    ended = delta.stop_reason.name.lower()
        except KeyboardInterrupt:
            ended = "Ctrl-C"

        seconds = perf_counter() - start
        print(f"{answer[shown:]}\n\n{len(tokens)} tokens in {seconds:.2f} s, the first after {1e3 * first:.0f} ms; "
              f"ended by {ended}")  # fmt: skip


if __name__ == "__main__":
    main()
