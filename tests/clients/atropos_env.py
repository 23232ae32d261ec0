"""A small Atropos environment: a completion's score is the share of its tokens in the upper half of the ids.

python atropos_env.py RUN_API BASE_URL API_KEY TOKENIZER TEMPERATURE
"""

import asyncio
import sys

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

TOKENS = 8


class UpperHalf(BaseEnv):
    name = "upper_half"
    temperature = 1.0

    async def setup(self):
        """Load nothing."""

    async def evaluate(self, *args, **kwargs):
        """Evaluate nothing."""

    async def get_next_item(self):
        return "Country: Peru"

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=item, n=self.config.group_size, max_tokens=TOKENS, temperature=self.temperature, ignore_eos=True
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[_score(node.masked_tokens) for node in nodes],
            generation_params={"temperature": self.temperature},
        )
        return group, []


def _score(mask):
    trained = [token for token in mask if token != -100]
    return sum(token >= 128 for token in trained) / len(trained)


def main():
    run_api, base_url, api_key, tokenizer, temperature = sys.argv[1:]
    config = BaseEnvConfig(
        group_size=8,
        batch_size=16,
        total_steps=10_000,
        max_token_length=64,
        tokenizer_name=tokenizer,
        rollout_server_url=run_api,
        use_wandb=False,
        wandb_name="upper_half",
        max_batches_offpolicy=1,
        max_num_workers=4,
        include_messages=False,
        ensure_scores_are_not_same=False,
    )
    server = APIServerConfig(
        base_url=base_url,
        api_key=api_key,
        model_name=tokenizer,
        server_type="vllm",
        num_requests_for_eval=1,
        timeout=60,
    )
    env = UpperHalf(config, [server], slurm=False)
    env.temperature = float(temperature)
    asyncio.run(env.env_manager())


main()
