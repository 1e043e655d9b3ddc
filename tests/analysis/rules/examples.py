"""A strategy for every operator that there is a rule for."""

from tests.analysis.rules.chosen import BY_ELEMENT, BY_PLACE, by_element, by_place, indexed
from tests.analysis.rules.computed import NORMS, PRODUCTS, REDUCTIONS, STAYS, norms, products, reductions, stays
from tests.analysis.rules.moved import (
    JOINED,
    KEEPS,
    MOVES,
    NEW,
    PARTS,
    VIEWS,
    copies,
    joined,
    keeps,
    moves,
    new_ones,
    parts,
    views,
)
from tests.analysis.rules.sequences import LOOKED_UP, SHAPED, looked_up, shaped
from tests.analysis.rules.tensors import Strategy

_FAMILIES: dict[frozenset[str], Strategy] = {
    REDUCTIONS: reductions,
    NORMS: norms,
    STAYS: stays,
    KEEPS: keeps,
    NEW: new_ones,
    frozenset(["copy_"]): copies,
    VIEWS: views,
    MOVES: moves,
    PARTS: parts,
    PRODUCTS: products,
    JOINED: joined,
    BY_ELEMENT: by_element,
    BY_PLACE: by_place,
    frozenset(["index"]): indexed,
}
EXAMPLES = {name: family(name) for names, family in _FAMILIES.items() for name in names}
# Of what is looked up and shaped there are rules of their own, where it is the sequence that is cut.
_OF_SEQUENCES: dict[frozenset[str], Strategy] = {LOOKED_UP: looked_up, SHAPED: shaped}
EXAMPLES_OF_SEQUENCES = {name: family(name) for names, family in _OF_SEQUENCES.items() for name in names}
