"""How fast the trainer trains, beside others, and its claims: padding, prefixes, streaming, meshes.

What is trained on are recorded groups of multi-turn FrozenLake, eight members each. Peers run each in a
virtual environment of its own under --venvs (benchmarks/peers holds the scripts), by turns with ours, as
the machine is shared; what can't be installed says so in its row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine import load_row
from peers.session import PeerError
from table import Table
from trainer_claims import padding_rows, prefix_rows, streaming_rows
from trainer_meshes import mesh_rows
from trainer_peers import peer_rows

from gymllm.errors import GymLLMError
from gymllm_trainers.memory import keep_freed_memory

SECTIONS = ("peers", "padding", "prefix", "streaming", "meshes")


def main() -> None:
    """Prints the table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of each: the small model alone")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    cache = Path("~/.cache/gymllm/benchmarks").expanduser()
    parser.add_argument("--venvs", type=Path, default=cache, help="where peers are installed")
    parser.add_argument(
        "--model", default="smollm2", help="whose tokenizer the trace of the 135 M model has"
    )
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    quick, table = arguments.quick, Table()
    keep_freed_memory()  # as gymllm-train does
    load_row(table, "before")
    for section in arguments.only:
        try:
            if section == "peers":
                peer_rows(
                    table, arguments.venvs, arguments.model, quick=quick, peers=arguments.peers
                )
            elif section == "padding":
                padding_rows(table, quick=quick)
            elif section == "prefix":
                prefix_rows(table, quick=quick)
            elif section == "streaming":
                streaming_rows(table, quick=quick)
            else:
                mesh_rows(table, quick=quick)
        except (GymLLMError, PeerError) as error:
            table.add(f"the rest of {section}", f"not measured: {error}")
    load_row(table, "after")
    table.print_json()


if __name__ == "__main__":
    main()
