"""`kvstrata demo`: the planner at work on a small hybrid model, drawn in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvstrata.cli.output import results
from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid, GroupChunks
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.core.lookups import ChunkLookup, LookupCodes, to_codes
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.load_plan import LoadBounds, LoadPlan, choose_load
from kvstrata.planning.request_ledger import RequestLedger, StateOffer
from kvstrata.planning.store_plan import choose_stores

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS: Final = 2_600
STEPS: Final = (1_056, 2_112, 2_600)
"""Where the engine's prefill steps end: at boundaries where a state can be kept, then the rest."""
TOKENS_PER_CELL: Final = 44

FULL: Final = GroupId(0)
WINDOW: Final = GroupId(1)
RECURRENT: Final = GroupId(2)

_STYLES: Final = {
    ChunkLookup.READY: "green",
    ChunkLookup.ARRIVING: "yellow",
    ChunkLookup.ABSENT: "bright_black",
    ChunkLookup.FAILED: "red",
    ChunkLookup.UNKNOWN: "yellow",
}


def demo_layout() -> KVLayout:
    """A hybrid model: full attention, a sliding window, and a gated delta net."""

    def layers(kind: str, count: int, page_bytes: int) -> tuple[KVLayer, ...]:
        return tuple(KVLayer(f"{kind}.{index}", page_bytes) for index in range(count))

    return KVLayout(
        groups=(
            KVGroup(kind=GroupKind.FULL, block_tokens=16, layers=layers("full", 4, 16 * 4096)),
            KVGroup(
                kind=GroupKind.WINDOW,
                block_tokens=16,
                window_tokens=512,
                layers=layers("window", 4, 16 * 4096),
            ),
            KVGroup(
                kind=GroupKind.RECURRENT, block_tokens=528, layers=layers("delta", 8, 1_114_112)
            ),
        ),
        hash_block_tokens=16,
        dtype="bfloat16",
    )


class Scene:
    """One request against one state of the cache."""

    def __init__(self, geometry: ChunkGeometry) -> None:
        hasher = PrefixHasher(geometry.layout.hash_block_tokens)
        hasher.extend(range(PROMPT_TOKENS))
        self.geometry = geometry
        self.grid = ChunkGrid(geometry, hasher.hashes)
        self.cache: dict[ChunkKey, ChunkLookup] = {}

    def prefill(self) -> None:
        """Run the prompt through the store planner, step by step, as an engine would."""
        ledger = RequestLedger(self.grid)
        for computed in STEPS:
            ledger.advance(computed)
            if computed % self.geometry.layout.hit_stride_tokens == 0:
                ledger.offer_state(StateOffer(RECURRENT, computed))
            plan = choose_stores(ledger)
            ledger.begin(plan.chunks)
            ledger.settle(plan.chunks)
            self.cache |= {self.grid.key(*ref): ChunkLookup.READY for ref in plan.chunks}

    def set(self, group_id: GroupId, index: int, lookup: ChunkLookup) -> None:
        """Change what the cache says about one chunk."""
        self.cache[self.grid.key(group_id, index)] = lookup

    def plan(self) -> LoadPlan:
        """Ask for a hit."""
        return choose_load(self.geometry, self.grid.lookup(self.lookup), LoadBounds(PROMPT_TOKENS))

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """What the cache says about each key."""
        return to_codes(self.cache.get(key, ChunkLookup.ABSENT) for key in keys)

    def picture(self, title: str, remark: str) -> Panel:
        """The cache, the usable length, and why it is not longer."""
        plan = self.plan()
        rows = [self._strip(chunks, plan) for chunks in self.geometry.groups]
        return Panel(
            Group(
                Text(remark, style="italic"), Text(), *rows, _ruler(plan), Text(), _verdict(plan)
            ),
            title=title,
            title_align="left",
        )

    def _strip(self, chunks: GroupChunks, plan: LoadPlan) -> Text:
        needed = {load.group_id: load.chunks for load in plan.loads}.get(chunks.group_id)
        strip = Text(f"{chunks.group.kind:<10}", style="bold")
        width = chunks.chunk_tokens // TOKENS_PER_CELL
        for index, key in enumerate(self.grid.keys(chunks.group_id)):
            lookup = self.cache.get(key, ChunkLookup.ABSENT)
            strip.append(_cell(lookup, width, is_loaded=needed is not None and index in needed))
        return strip


def _cell(lookup: ChunkLookup, width: int, *, is_loaded: bool) -> Text:
    body = {ChunkLookup.READY: "█" if is_loaded else "▒", ChunkLookup.ABSENT: "·"}.get(lookup, "░")
    return Text(body * (width - 1) + " ", style=_STYLES[lookup])


def _ruler(plan: LoadPlan) -> Text:
    label = f" {plan.num_tokens:,} tokens usable ┤"
    width = plan.num_tokens // TOKENS_PER_CELL
    return Text(" " * 10 + label.rjust(width, "─"), style="bold cyan")


def _verdict(plan: LoadPlan) -> Text:
    text = Text()
    text.append(f"Usable: {plan.num_tokens:,} of {PROMPT_TOKENS:,} tokens", style="bold")
    text.append(f" (a complete cache would give {plan.possible_tokens:,}")
    text.append(f"; waiting would give {plan.awaited_tokens:,})" if _worth_waiting(plan) else ")")
    for obstacle in plan.obstacles:
        text.append(f"\n  because {obstacle}", style="red")
    return text


def _worth_waiting(plan: LoadPlan) -> bool:
    return plan.awaited_tokens > plan.num_tokens


def _group_table(geometry: ChunkGeometry) -> Table:
    table = Table(title="A hybrid model's KV groups, and how they are cut", title_justify="left")
    for name in ("group", "kind", "a hit of N needs", "block", "chunk", "bytes"):
        table.add_column(name)
    needs = {
        GroupKind.FULL: "[0, N)",
        GroupKind.WINDOW: "[N - {back}, N)",
        GroupKind.RECURRENT: "a state at exactly N",
    }
    for chunks in geometry.groups:
        group = chunks.group
        table.add_row(
            str(chunks.group_id),
            group.kind,
            needs[group.kind].format(back=(group.window_tokens or 1) - 1),
            f"{group.block_tokens} tokens",
            f"{chunks.chunk_tokens} tokens",
            f"{chunks.chunk_bytes / 2**20:.2f} MiB",
        )
    return table


def demo() -> None:
    """Show the planner at work on a hybrid model."""
    console: Console = results()
    geometry = cut_into_chunks(demo_layout())
    console.print(_group_table(geometry))
    console.print(
        "[green]█[/] loaded for the hit  [green]▒[/] stored  [yellow]░[/] arriving  "
        f"[red]░[/] failed  [bright_black]·[/] not stored  (cell: {TOKENS_PER_CELL} tokens)\n"
    )
    scene = Scene(geometry)
    scene.prefill()
    console.print(
        scene.picture(
            "1. Stored by one prefill, asked for again",
            "Prefill steps ended at 1,056 and 2,112: states exist there, and only the windows "
            "before them can be read again.",
        )
    )
    scene.set(WINDOW, 10, ChunkLookup.ABSENT)
    console.print(
        scene.picture(
            "2. One window chunk was evicted",
            "Usable lengths are not downward closed: the next one lies far below.",
        )
    )
    scene.set(WINDOW, 10, ChunkLookup.ARRIVING)
    console.print(
        scene.picture(
            "3. The same chunk is being promoted", "The planner knows what waiting is worth."
        )
    )
    scene.set(WINDOW, 10, ChunkLookup.READY)
    scene.set(RECURRENT, 3, ChunkLookup.FAILED)
    scene.set(FULL, 4, ChunkLookup.ABSENT)
    console.print(
        scene.picture(
            "4. A corrupt state, and a hole in full attention",
            "Nothing is guessed: without a common length the request computes.",
        )
    )
