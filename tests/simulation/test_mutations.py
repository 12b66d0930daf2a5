"""Each safety rule, broken on purpose, is missed by some world: the simulation sees what it is there for."""

import pytest

from tests.simulation.mutations import MUTATIONS, SEEDS, Mutation
from tests.simulation.scenario import Scenario
from tests.simulation.world import SimulationError

EACH = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


def breaks(seed: int) -> bool:
    try:
        Scenario(seed).run()
    except SimulationError:
        return True
    return False


@EACH
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    """By the seed that is known for it, or, when the code has moved on, by another of the first."""
    assert not breaks(mutation.found_by), "the world is sound while the rule holds"
    with mutation.applied():
        assert any(breaks(seed) for seed in (mutation.found_by, *range(SEEDS)))


@pytest.mark.soak
@EACH
def test_a_broken_rule_is_found_by_one_of_the_first_seeds(mutation: Mutation) -> None:
    with mutation.applied():
        assert any(map(breaks, range(SEEDS)))


def test_every_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 15
