"""Checks where our packages come from: their names are generic, and another `router` could run instead.

Imports none of them, and nothing else that could be the wrong one.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

_OURS = Path(__file__).resolve().parent.parent


def foreign_packages(names: Iterable[str]) -> list[str]:
    """A sentence for each package that would be imported from elsewhere than beside this one.

    A package that is not there at all is no matter: a container holds what its service needs.
    """
    complaints = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        where = Path(next(iter(spec.submodule_search_locations or [spec.origin or "?"]))).resolve()
        if where != _OURS / name:
            complaints.append(
                f"the package {name} would be imported from {where}, and ours is {_OURS / name}; "
                f"take the other one off the path (PYTHONPATH, the working directory, site-packages)"
            )
    return complaints
