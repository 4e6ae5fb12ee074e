"""The parity matrix: its rules are the command line's, and every legal pair of levels meets."""

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest

from megazero.flags.validate import check_device
from tests.helpers.table import for_each
from tests.parallel.matrix import (
    FACTORS,
    NUMBERS,
    ON_GPU,
    RULES,
    WITH_EXPERTS,
    Choice,
    Factors,
    Matrix,
    Rule,
    case_of,
    covers,
    numbers,
    on_gpu,
    products,
    with_experts,
)


def random_choices(factors: Factors, count: int) -> list[Choice]:
    draw = random.Random(1)
    return [{name: draw.choice(levels) for name, levels in factors.items()} for _ in range(count)]


@cache
def rules_of(factors: tuple[str, ...]) -> list[Rule]:
    return [rule for rule in RULES if set(rule.factors) <= set(factors)]


def broken(choice: Choice) -> Iterator[Rule]:
    return (rule for rule in rules_of(tuple(choice)) if not rule.allows(choice))


@pytest.mark.second
@pytest.mark.long
@for_each("factors", [FACTORS, NUMBERS, ON_GPU, WITH_EXPERTS])
def test_a_pair_is_legal_where_some_choice_has_it(factors: Factors) -> None:
    """Against random choices, which meet all rules by themselves or do not count."""
    matrix = Matrix(factors)
    for choice in random_choices(factors, 20_000):
        if not any(broken(choice)):
            for one, other in itertools.combinations(choice.items(), 2):
                assert matrix.partners[matrix.number[one], matrix.number[other]], (one, other)


@pytest.mark.second
@pytest.mark.long
def test_every_case_is_legal_and_every_legal_pair_meets() -> None:
    found = covers()
    matrix = Matrix(FACTORS)
    for choice in products():
        case_of(choice).config()
    for choice in itertools.chain(*found):
        assert not any(broken(choice))
        case_of(choice).config()  # which the command line's checks pass
        matrix.meet(choice)
    assert not matrix.missing.any()
    small = Matrix(NUMBERS)
    for choice in itertools.chain(*numbers()):
        assert case_of(choice).world <= 2
        case_of(choice).config()
        small.meet(choice)
    assert not (small.missing & small.reach(2)).any()
    experts = Matrix(WITH_EXPERTS)
    for choice in itertools.chain(*with_experts()):
        assert case_of(choice).world <= 4 and not any(broken(choice))
        case_of(choice).config()
        experts.meet(choice)
    assert not (experts.missing & experts.reach(4)).any()
    gpu = Matrix(ON_GPU)
    for choice in itertools.chain(*on_gpu()):
        assert case_of(choice).world <= 4
        check_device(case_of(choice).config(), "cuda")
        gpu.meet(choice)
    assert not gpu.missing.any()


@pytest.mark.second
@pytest.mark.long
def test_what_a_rule_calls_refused_is_refused() -> None:
    """Every such rule is tried with a choice that breaks no other."""
    seen = set()
    small = FACTORS | {"pp": (1, 2), "dp": (2, 4), "cp": (1, 2), "tp": (1, 2, 3, 4)}
    mixtures = {name: ON_GPU[name] for name in ("dp", "cp", "tp", "sp", "architecture", "mixture")}
    samples = random_choices(small, 60_000) + random_choices(WITH_EXPERTS, 20_000)
    samples += random_choices(mixtures, 1_000)
    samples += random_choices({name: ON_GPU[name] for name in ("precision", "masters")}, 100)
    for choice in samples:
        rules = list(itertools.islice(broken(choice), 2))
        if len(rules) == 1 and rules[0].refused and rules[0] not in seen:
            seen.add(rules[0])
            with pytest.raises(ValueError, match="--"):
                case_of(choice).config()
    assert seen == {rule for rule in RULES if rule.refused}


@pytest.mark.second
def test_the_matrix_is_the_same_every_time() -> None:
    again = covers.__wrapped__()
    assert again == covers()


def test_the_default_suite_has_every_level() -> None:
    """Compiled layers alone are slow tests. The second ring has those of the pretended GPU."""
    missing = []
    gpu = on_gpu()
    for factors, choices in (
        (FACTORS, covers().default),
        (NUMBERS, numbers().default),
        (ON_GPU, gpu.default + gpu.second),
        (WITH_EXPERTS, with_experts().default),
    ):
        met = {item for choice in choices for item in choice.items()}
        missing += [item for name in factors for item in ((name, level) for level in factors[name]) if item not in met]
    assert missing == [("compile", True)]
