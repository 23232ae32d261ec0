"""Cache certificates: engines of one process that load the same model with the same options share one result.

For tests of what engines do after loading. What a certificate finds, and that every engine of a service has one, is
covered by test_certified_base, test_models_table and the tests of services.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from trainer_service.engine.certificate import certified_base


def _key(loading) -> Hashable:
    """Return what a certificate depends on."""
    computes = replace(loading.options, scratch_dir="", run_memory_bytes=None, failpoints="")
    files = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(Path(computes.model_path).iterdir()))
    return files, computes, loading.seed, loading.device, loading.ranks.size


@dataclass(frozen=True)
class KnownCertificates:
    """Results of certificates by what they depend on."""

    stocks: dict[Hashable, Any] = field(default_factory=dict)
    verdicts: dict[Hashable, Any] = field(default_factory=dict)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Cache the results of certificates until the block ends."""
        measure, certify = certified_base.UncertifiedBase.measure, certified_base.UncertifiedBase.certify

        def measure_once(loading, model):
            if (key := _key(loading)) not in self.stocks:
                self.stocks[key] = measure(loading, model)
            return self.stocks[key]

        def certify_once(loading, stock):
            if (key := _key(loading)) not in self.verdicts:
                self.verdicts[key] = certify(loading, stock)
            loading.use(self.verdicts[key].mode)
            return self.verdicts[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certified_base.UncertifiedBase, "measure", measure_once)
            patch.setattr(certified_base.UncertifiedBase, "certify", certify_once)
            yield
