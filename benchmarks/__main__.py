"""Every work with every peer that is installed: JSON, a table and a chart.

python -m benchmarks [--only W1,W4] [--peers jaxdp,keras] [--repeats 3]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import report
from .peers import PEERS
from .processes import ROOT, choose, run_round

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures, writes and prints; returns the contents of the JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", help="works, such as W1,W4; all by default")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each work")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder")
    parser.add_argument(
        "--add", action="store_true", help="to the rounds that are in the folder"
    )
    parser.add_argument(
        "--toy", action="store_true", help="tiny, to see whether it runs"
    )
    args = parser.parse_args(argv)
    works, peers = choose(args.only, args.peers)

    path = args.output / "results.json"
    args.output.mkdir(parents=True, exist_ok=True)
    results = {"machine": report.describe_machine(), "rounds": []}
    if args.add and path.exists():
        results["rounds"] = json.loads(path.read_text())["rounds"]
    for _ in range(args.repeats):
        for work in works:
            turn = sum(one["work"] == work.name for one in results["rounds"])
            doing = [peer for peer in peers if PEERS[peer].does(work)]
            one = run_round(work, doing, turn=turn, toy=args.toy)
            results["rounds"].append(one)
            path.write_text(json.dumps(results, indent=1) + "\n")
            _say(one)

    rounds = results["rounds"]
    table = report.markdown(rounds)
    (args.output / "results.md").write_text(table)
    report.draw(rounds, args.output / "speed.png")
    print(table)
    print(f"written to {args.output}")
    return results


def _say(one: dict[str, Any]) -> None:
    """Prints a line for each peer, as soon as its result is known."""
    expert = one["seconds_per_step"].get("expert")
    for name, value in one["seconds_per_step"].items():
        beside = f"{value / expert:6.2f} of E" if expert else ""
        loss = one["loss"].get(name)
        end = "" if loss is None else f"  loss {loss:.6g}"
        if not report.is_quiet(one, name):
            end += f"  (others took {one['busy'][name]:.0%} of the cores)"
        print(f"{one['work']:4} {name:15} {value * 1e6:9.1f} us {beside}{end}")
    for name, reason in one["skipped"].items():
        print(f"{one['work']:4} {name:15} not run: {reason}")
    for name, shown in one["failed"].items():
        print(f"{one['work']:4} {name:15} FAILED\n{shown}", file=sys.stderr)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(any(one["failed"] for one in main()["rounds"]))
