"""The pools and features that the SGLang hook covers, as tables for docs/compatibility.md.

python -m tests.sglang.support_tables     # prints them and writes them into the page
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcanary_plugin.hooks.sglang.features import FEATURES, Coverage, Feature
from kvcanary_plugin.hooks.sglang.layouts import LAYOUTS
from kvcanary_plugin.hooks.sglang.pools import COMPOSITES, UNSUPPORTED_POOLS
from tests.sglang.doc_blocks import table, write_block

POOLS = "SGLang pools"
FEATURES_BY_POOL = "SGLang features"


def pools_table() -> str:
    guarded = [
        [f"`{name}`", known.covers, known.left_out or "-"]
        for name, known in {**standalone(), **COMPOSITES}.items()
    ]
    refused = [[f"`{name}`", "nothing", reason] for name, reason in UNSUPPORTED_POOLS.items()]
    return table(("pool class", "guarded", "not guarded"), [*guarded, *refused])


def features_table() -> str:
    """A row a feature, a column for each set of pools that stand alike in all of them."""
    columns: dict[tuple[Coverage, ...], list[str]] = {}
    for name in guarded_pools():
        alike = tuple(coverage(feature, name) for feature in FEATURES)
        columns.setdefault(alike, []).append(name)
    header = (
        "feature",
        *(_heading(names) for names in columns.values()),
        "what is done, or why not",
    )
    rows = [
        [feature.name, *(alike[index] for alike in columns), feature.note]
        for index, feature in enumerate(FEATURES)
    ]
    return table(header, rows)


def standalone() -> Mapping[str, object]:
    return {name: layout for name, layout in LAYOUTS.items() if layout.group is not None}


def guarded_pools() -> list[str]:
    return [*standalone(), *COMPOSITES]


def coverage(feature: Feature, pool: str) -> Coverage:
    only = feature.pools
    return feature.coverage if only is None or pool in only else Coverage.UNSUPPORTED


def _heading(names: list[str]) -> str:
    if len(names) > len(guarded_pools()) / 2:
        return "any other pool"
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    for name, content in ((POOLS, pools_table()), (FEATURES_BY_POOL, features_table())):
        print(content, end="\n\n")
        write_block(name, content)


if __name__ == "__main__":
    main()
