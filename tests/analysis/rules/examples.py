"""A strategy for every operator that there is a rule for."""

from collections import defaultdict

from hypothesis.strategies import SearchStrategy

from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.chosen import BY_ELEMENT, BY_PLACE, by_element, by_place, indexed
from tests.analysis.rules.computed import (
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    STAYS,
    TRIANGLES,
    norms,
    products,
    reductions,
    stays,
    triangles,
)
from tests.analysis.rules.images import BATCH_NORMS, IMAGES, batch_norms, images
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
    TRIANGLES: triangles,
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
    LOOKED_UP: looked_up,
    SHAPED: shaped,
    IMAGES: images,
    BATCH_NORMS: batch_norms,
}
_STRATEGIES: dict[str, list[SearchStrategy[Example]]] = defaultdict(list)
for _names, _family in _FAMILIES.items():
    for _name in _names:
        _STRATEGIES[_name].append(_family(_name))
# Name of an operator -> strategies: of several, each has to be one that the rule says something of.
EXAMPLES = dict(_STRATEGIES)  # a rule without one is an error
