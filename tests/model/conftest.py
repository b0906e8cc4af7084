"""The settings that every run of the model has in common."""

import pytest

from duelog.store.wal import write_batch


@pytest.fixture(autouse=True)
def _the_same_draws_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed examples are the same in a checkout and beside an installed package.

    Hypothesis draws constants that it finds in the sources of modules outside site-packages now and then, so that
    its fixed examples would differ with the installation, and with every number that is written into the engine.
    """
    drawing = "hypothesis.internal.conjecture.providers.HypothesisProvider._maybe_draw_constant"
    monkeypatch.setattr(drawing, lambda *_, **__: None, raising=False)


@pytest.fixture(autouse=True)
def _little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have most runs of more than one message go to body files, where the store's durability is "commit"."""
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 120)
