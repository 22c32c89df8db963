"""Runs one of swebench's log parsers: the log from stdin, a JSON object of statuses to stdout.

    python -I swebench_worker.py parse_log_django VERSION ID < log

Of the package only the parsers are imported: what its top imports takes 4 seconds.
"""

# ruff: noqa: T201 - stdout is how it answers

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types


def main() -> int:
    """Parses."""
    found = importlib.util.find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        print("swebench is not installed", file=sys.stderr)
        return 1
    root = found.submodule_search_locations[0]
    for name, folder in (("swebench", root), ("swebench.harness", f"{root}/harness")):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    registry = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    if sys.argv[1] not in registry:
        print(*registry)
        return 3
    spec = types.SimpleNamespace(version=sys.argv[2], instance_id=sys.argv[3])
    log = sys.stdin.buffer.read().decode(errors="replace")
    print(json.dumps(registry[sys.argv[1]](log, spec)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
