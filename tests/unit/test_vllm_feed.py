"""A vLLM that hands tokens out in another way is refused when the engine starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm
from vllm.v1.engine.output_processor import OutputProcessor

from sampler_service.engine.vllm_feed import FedLlm


class Other(OutputProcessor):
    """vLLM's, or what another vLLM has in its place."""


def made(processor, handler=None):
    return SimpleNamespace(output_processor=processor(None, log_stats=False), output_handler=handler)


def test_vllm_as_it_is_known_is_taken_over():
    llm = made(OutputProcessor)
    assert FedLlm.of(llm).processor is llm.output_processor


@pytest.mark.parametrize("llm", [made(Other), made(OutputProcessor, handler=object())])
def test_another_conversion_or_one_that_runs_already_is_refused(llm):
    with pytest.raises(RuntimeError, match=vllm.__version__):
        FedLlm.of(llm)
