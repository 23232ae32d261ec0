"""The chat templates of model families, each with a tokenizer that has its special tokens.

The templates are those that the package trl ships. They are read from the installed package, which is never imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<\|[^|<>{}\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<(?:start|end)_of_\w+>|<\|\w+>|<\w+\|>")
_BOS = "<bos>"
_CHATML, _LLAMA, _GEMMA4 = (
    ("<|im_end|>",),
    ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ("<turn|>", "<|tool_response>"),
)
_THINKS = {"has_reasoning": True, "calls": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template, and what it writes."""

    name: str
    ends: tuple[str, ...]
    """The tokens that end sampling, as the models' generation_config.json has them; the first is the tokenizer's."""
    calls: int = 0
    """Most calls of tools in a message."""
    has_reasoning: bool = False

    def template(self, variant: str = "") -> str:
        """Return the template, or its variant `_training`, which says what it has the model generate."""
        return _path(self.name + variant).read_text()

    def has_variant(self, variant: str) -> bool:
        return _path(self.name + variant).exists()

    def tokenizer(self, variant: str = "") -> PreTrainedTokenizerFast:
        """Make a byte-level tokenizer in which each special token of the template is one token."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = dict.fromkeys([*self.ends, _BOS, *_SPECIAL.findall(self.template())])
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=self.ends[0],
            bos_token=_BOS,
            chat_template=self.template(variant),
            name_or_path=self.name + variant,
        )

    def save(self, directory: Path) -> PreTrainedTokenizerFast:
        """Write what a model's directory has of it, and return the tokenizer."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(directory)
        ends = tokenizer.convert_tokens_to_ids(list(self.ends))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return tokenizer


FAMILIES = (
    Family("cohere", ("<|END_OF_TURN_TOKEN|>",)),
    Family("cohere2", ("<|END_OF_TURN_TOKEN|>",)),
    Family("deepseek_r1_distill", ("<｜end▁of▁sentence｜>",), has_reasoning=True),
    Family("deepseekv3", ("<｜end▁of▁sentence｜>",), has_reasoning=True),
    Family("gemma", ("<eos>", "<end_of_turn>")),
    Family("gemma3", ("<eos>", "<end_of_turn>")),
    Family("gemma4", _GEMMA4, calls=2),
    Family("gemma4_v5", _GEMMA4, **_THINKS),
    Family("glm4moe", ("<|endoftext|>", "<|user|>", "<|observation|>"), **_THINKS),
    Family("gptoss", ("<|return|>", "<|call|>"), calls=1, has_reasoning=True),
    Family("idefics3", ("<end_of_utterance>",)),
    Family("lfm2", _CHATML),
    Family("lfm2_2_5", _CHATML, **_THINKS),
    Family("lfm2_v2", _CHATML, calls=2),
    Family("llama3", _LLAMA),
    Family("llama3_1", _LLAMA, calls=1),
    Family("llama3_2", _LLAMA, calls=1),
    Family("llava_next", ("</s>",)),
    Family("muse_glimmer", ("<|eot|>",), **_THINKS),
    Family("nemotron_3_5_lightning", _CHATML, **_THINKS),
    Family("nemotron_3_nano", _CHATML, **_THINKS),
    Family("nemotron_3_ultra", _CHATML, **_THINKS),
    Family("phi3", ("<|endoftext|>", "<|end|>")),
    Family("phi3_5", ("<|endoftext|>", "<|end|>", "<|assistant|>")),
    Family("qwen2_5", _CHATML, calls=2),
    Family("qwen2_5_vl", _CHATML),
    Family("qwen3", _CHATML, **_THINKS),
    Family("qwen3_5_nothink", _CHATML, calls=2),
    Family("qwen3_5_think", _CHATML, **_THINKS),
    Family("qwen3_6", _CHATML, **_THINKS),
    Family("qwen3_8", _CHATML, **_THINKS),
    Family("qwen3_instruct_2507", _CHATML, calls=2),
    Family("qwen3_vl", _CHATML, calls=2),
    Family("smolvlm", ("<end_of_utterance>",)),
)


def _path(name: str) -> Path:
    return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja")))
