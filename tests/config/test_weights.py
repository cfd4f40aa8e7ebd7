"""What the facts of a model say of its size, against the models themselves."""

import re
from pathlib import Path

import pytest
from oracle import make_tiny
from zoo import ZOO

from quire.config.model import read_checkpoint
from quire.config.weights import count


@pytest.mark.parametrize("architecture", ZOO)
def test_the_facts_of_a_model_tell_how_many_numbers_it_has(architecture: str, tmp_path: Path) -> None:
    """A gate, a tied head, a shared expert or a kind of mixer that is not counted."""
    path, model = make_tiny(architecture, tmp_path)
    facts = read_checkpoint(path).facts
    unused = re.compile(facts.unused or "$^")
    numbers = sum(numbers.numel() for name, numbers in model.named_parameters() if not unused.search(name))
    assert count(facts).total == pytest.approx(numbers, rel=0.03)
