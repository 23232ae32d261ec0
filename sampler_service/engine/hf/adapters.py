"""PEFT adapters inside one transformers model, switched between forward passes."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from transformers import PreTrainedModel

from paceline.errors import InvalidArgument, InvalidShape, PacelineError
from paceline.layout import WEIGHTS_FILE
from paceline.weights import read_header
from sampler_service.engine.model_files import check_adapter, linear_shapes, read_adapter
from sampler_service.engine.protocol import Adapter


class AdapterBank:
    """The adapters of one model. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._linear = linear_shapes(model)
        self.loaded: set[int] = set()
        """Ids of the adapters that are loaded."""

    def add(self, adapter: Adapter) -> None:
        """Load an adapter. Raises RankTooLarge, InvalidShape, InvalidArgument, and then leaves the model unchanged."""
        if adapter.adapter_id in self.loaded:
            return
        check_adapter(read_adapter(adapter.path), self._linear, self._max_rank)
        try:
            self._inject(adapter)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            self._delete(adapter)
            raise InvalidArgument("PEFT refuses the adapter's configuration", field="adapter") from error
        except PacelineError:
            self._delete(adapter)
            raise
        self.loaded.add(adapter.adapter_id)
        self._model.train(mode=False)

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter; unknown ones are ignored."""
        if adapter.adapter_id not in self.loaded:
            return
        self._delete(adapter)
        self.loaded.discard(adapter.adapter_id)

    def activate(self, adapter: Adapter | None) -> None:
        """Make the next forward passes use only this adapter, or the base model if None.

        Raises KeyError if the adapter is not loaded; other weights are never served instead.
        """
        if adapter is not None and adapter.adapter_id not in self.loaded:
            raise KeyError(f"adapter {adapter.name} is not loaded")
        for layer in self._layers():
            layer.enable_adapters(enabled=adapter is not None)
            if adapter is not None:
                layer.set_adapter(_key(adapter), inference_mode=True)

    def _inject(self, adapter: Adapter) -> None:
        read_header(adapter.path / WEIGHTS_FILE)  # refuses a link, and a header that would take all memory
        config = LoraConfig.from_pretrained(str(adapter.path))
        config.inference_mode = True
        inject_adapter_in_model(config, self._model, _key(adapter))
        weights = load_file(adapter.path / WEIGHTS_FILE)
        result: Any = set_peft_model_state_dict(self._model, weights, adapter_name=_key(adapter))
        if result.unexpected_keys:
            raise InvalidShape(
                f"{result.unexpected_keys[0]} belongs to a module that adapter_config.json does not name",
                field="adapter",
            )

    def _delete(self, adapter: Adapter) -> None:
        for layer in self._layers():
            layer.delete_adapter(_key(adapter))

    def _layers(self) -> list[BaseTunerLayer]:
        return [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]


def _key(adapter: Adapter) -> str:
    """Return the adapter's name inside the model. Module names cannot contain dots."""
    return f"adapter_{adapter.adapter_id}"
