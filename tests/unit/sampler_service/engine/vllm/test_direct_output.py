"""A vLLM that delivers tokens in an unknown way is refused when the engine starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm
from vllm.v1.engine.output_processor import OutputProcessor

from sampler_service.engine.protocol import EngineUnfit
from sampler_service.engine.vllm.direct_output import TokenTap


class Other(OutputProcessor):
    """A processor that another vLLM may have in place of the known one."""


def made(processor, handler=None):
    return SimpleNamespace(output_processor=processor(None, log_stats=False), output_handler=handler)


def test_vllm_as_it_is_known_is_taken_over():
    llm = made(OutputProcessor)
    assert TokenTap.install(llm) is llm.output_processor


def test_what_vllm_made_its_conversion_with_is_kept_and_what_it_is_given_passed_on(monkeypatch):
    given = []
    monkeypatch.setattr(
        OutputProcessor, "process_outputs", lambda self, *values, **named: given.append((values, named))
    )
    monkeypatch.setattr(OutputProcessor, "add_request", lambda self, *values, **named: given.append((values, named)))
    stats = object()
    replaced = OutputProcessor(None, log_stats=False, tracing_enabled=True, admission_stats=stats)
    processor = TokenTap(replaced)
    assert (processor.tracing_enabled, processor.admission_stats) == (True, stats)
    processor.process_outputs([], 1.0, None, "v", "later", new=1)
    request = SimpleNamespace(external_req_id="one", request_id="one-0")
    processor.request_states["one-0"] = SimpleNamespace(detokenizer=None)  # as vLLM's registers it
    processor.add_request(request, None, None, 0, None, "later", new=1)
    assert given == [(([], 1.0, None, "v", "later"), {"new": 1}), ((request, None, None, 0, None, "later"), {"new": 1})]


@pytest.mark.parametrize("llm", [made(Other), made(OutputProcessor, handler=object())])
def test_another_conversion_or_one_that_runs_already_is_refused(llm):
    with pytest.raises(EngineUnfit, match=vllm.__version__):
        TokenTap.install(llm)
