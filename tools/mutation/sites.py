"""The mutants of a file, and a seeded draw from them. Knows nothing of tests.

The changes are Cosmic Ray's. A site is one place and one kind of change: a `+` is one site with
eleven variants. A draw takes one variant of every site before it takes a second of any, so that
arithmetic, which has the most variants, does not outweigh conditions.
"""

from __future__ import annotations

import ast
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tools.mutation.rules import Position, excluded

# Variants that mean the same for what they are used on: None, enum members, small numbers.
SAME = {"Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """The `occurrence`-th change that one of Cosmic Ray's operators makes to the file `path`."""

    path: str
    start: Position
    kind: str
    operator: str
    occurrence: int

    def apply(self, source: str) -> str | None:
        """The changed source; None where it is no Python, or the same Python."""
        operator = plugins.get_operator(self.operator)()
        try:
            changed: str = mutate_code(source, operator, self.occurrence)
        except AttributeError:  # it cannot replace a dotted name: `except struct.error`
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        except SyntaxError:
            return None
        return None if same else changed


def mutants(path: str) -> list[Mutant]:
    """All mutants of a file but for the places that the rules leave out."""
    source = Path(path).read_text(encoding="utf-8")
    left_out = list(excluded(source))
    nodes = list(ast_nodes(get_ast(source)))
    signs = [node for node in nodes if node.type == "operator"]
    found = []
    for name in plugins.operator_names():
        if plugins.get_operator(name).arguments() or name.rpartition("Operator_")[2] in SAME:
            continue
        operator = plugins.get_operator(name)()
        where = signs if "BinaryOperator" in name else nodes
        positions = (at for node in where for at in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(low <= start < high for low, high in left_out):
                kind = name.split("/")[1].split("_")[0]
                found.append(Mutant(path, start, kind, name, occurrence))
    return found


def draw(found: list[Mutant], seed: int, sample: int) -> list[Mutant]:
    """`sample` of the mutants, or all where there are fewer, in the order of the files."""
    chance = random.Random(seed)
    sites: dict[tuple[str, Position, str], list[Mutant]] = {}
    for mutant in found:
        sites.setdefault((mutant.path, mutant.start, mutant.kind), []).append(mutant)
    sources = {path: Path(path).read_text(encoding="utf-8") for path, _, _ in sites}
    variants = list(sites.values())
    chance.shuffle(variants)
    for each in variants:
        chance.shuffle(each)
    turns = range(max(map(len, variants), default=0))
    drawn: list[Mutant] = []
    for mutant in (each[turn] for turn in turns for each in variants if turn < len(each)):
        if len(drawn) == sample:
            break
        if mutant.apply(sources[mutant.path]) is not None:
            drawn.append(mutant)
    return sorted(drawn, key=lambda m: (m.path, m.start, m.operator))
