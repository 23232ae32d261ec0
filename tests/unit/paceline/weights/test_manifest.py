"""An adapter's configuration is read in full, or refused by the name of the missing or wrong field."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from peft import LoraConfig as PeftLoraConfig
from safetensors.numpy import save_file

from paceline.errors import InvalidArgument
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.types import ServedModel
from paceline.weights import describe_weights, parse_adapter_config, read_adapter_config

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
WRONG = {
    "r": [None, True, "4", 4.0, 0, -1, 1 << 31, 10**30, [4]],
    "lora_alpha": [None, True, "8", [8], float("nan"), float("inf"), 10**400],
    "target_modules": [None, [], "", [""], [1], {"q_proj": 1}, 1],
    "rank_pattern": [1, [4], {"q_proj": "4"}, {"q_proj": 0}],
}
VALUES = [(field, value) for field, values in WRONG.items() for value in values]


def changed(**fields: object) -> bytes:
    return json.dumps(CONFIG | fields).encode()


def test_what_peft_writes_is_read(tmp_path):
    for alpha, modules in [(8, ["q_proj", "v_proj"]), (0.5, "all-linear"), (-3, r".*\.q_proj")]:
        made = PeftLoraConfig(r=4, lora_alpha=alpha, target_modules=modules, rank_pattern={"v_proj": 9})
        made.save_pretrained(tmp_path)
        read = read_adapter_config(tmp_path / CONFIG_FILE)
        assert (read.rank, read.largest_rank) == (4, 9)
        assert read.settings["lora_alpha"] == alpha
    assert parse_adapter_config(changed(rank_pattern=None)).largest_rank == 4


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_field_that_is_missing_is_named(field):
    text = json.dumps({name: value for name, value in CONFIG.items() if name != field}).encode()
    with pytest.raises(InvalidArgument, match=rf"^adapter_config\.{field}: is missing; save the adapter with PEFT"):
        parse_adapter_config(text)


@pytest.mark.parametrize(("field", "value"), VALUES, ids=lambda value: str(value)[:20])
def test_a_field_of_another_type_or_range_is_named(field, value):
    with pytest.raises(InvalidArgument, match=rf"^adapter_config\.{field}: is not .*; save the adapter with PEFT"):
        parse_adapter_config(changed(**{field: value}))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"4", b"null", b'"r"'], ids=lambda text: str(text)[:20]
)
def test_what_is_no_object_of_json_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"^adapter_config: is not (a )?JSON"):
        parse_adapter_config(text)


def test_no_manifest_is_made_of_an_adapter_whose_configuration_is_none(tmp_path):
    save_file({"a": np.ones((4, 2), np.float32)}, tmp_path / WEIGHTS_FILE)
    model = ServedModel("tiny", "run-" + "0" * 32, 1)
    for text, wrong in [(None, "adapter_config: does not exist"), (b"{}", "adapter_config.r: is missing")]:
        if text is not None:
            (tmp_path / CONFIG_FILE).write_bytes(text)
        with pytest.raises(InvalidArgument, match=re.escape(wrong)):
            describe_weights(tmp_path, model, tenant="team", step=0)
    (tmp_path / CONFIG_FILE).write_bytes(changed())
    assert describe_weights(tmp_path, model, tenant="team", step=0).rank == 4
