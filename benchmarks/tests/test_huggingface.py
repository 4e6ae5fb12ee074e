"""benchmarks.huggingface: memory of export and import."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.huggingface import measure
from megazero.flags.config import ModelConfig

pytestmark = pytest.mark.second


@pytest.mark.slow  # half a minute; bands of rows are tried by default
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Eight times the layers, of 12.6 MB each: less than two layers' memory more."""
    model = ModelConfig(hidden_size=512, num_attention_heads=8, seq_length=64, vocab_size=999)
    small, large = (measure(replace(model, num_layers=layers), tmp_path / str(layers)) for layers in (4, 32))
    assert large.export_mb < small.export_mb + 25 and large.import_mb < small.import_mb + 25, (small, large)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    """A table of 1 GiB instead of 512 MiB: it is read, converted and written band by band."""
    model = ModelConfig(hidden_size=512, num_attention_heads=8, seq_length=64, num_layers=1)
    small, large = (measure(replace(model, vocab_size=size), tmp_path / str(size)) for size in (256 * 1024, 512 * 1024))
    assert large.export_mb < small.export_mb + 100 and large.import_mb < small.import_mb + 100, (small, large)
