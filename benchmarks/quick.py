"""Checks in under two minutes whether jaxdp has become slower.

python -m benchmarks.quick             exit status 1 if a ratio is 15 % worse
python -m benchmarks.quick --record    keep today's ratios as those to compare with

Times depend on the machine. Ratios to E, the expert's loop in the same round, depend on
it less. The ratios in `recorded.json` come from the machine that the file names.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from . import report
from .peers import PEERS
from .processes import choose, run_round

RECORDED = Path(__file__).with_name("recorded.json")
ALLOWED = 0.15
"""How much worse a ratio may be."""
PEERS_WATCHED = "jaxdp"


def compare(
    found: dict[str, dict[str, float]], recorded: dict[str, dict[str, float]]
) -> list[tuple[str, str, float, float | None, bool]]:
    """Returns rows: work, peer, ratio, recorded ratio, and whether it is too much
    worse.

    A recorded peer that is now missing also counts as too much worse, with an infinite
    ratio.
    """
    rows = []
    for work in {**recorded, **found}:
        old, new = recorded.get(work, {}), found.get(work)
        if new is None:  # not among the works asked for
            continue
        for peer in {**old, **new}:
            if peer == "expert":
                continue
            ratio, before = new.get(peer, float("inf")), old.get(peer)
            worse = before is not None and ratio > before * (1 + ALLOWED)
            rows.append((work, peer, ratio, before, worse))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quick", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--record", action="store_true", help="rewrite the file")
    parser.add_argument("--only", default="W1,W4", help="works")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=100, help="start no round after"
    )
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    parser.add_argument(
        "--toy", action="store_true", help="tiny, to see whether it runs"
    )
    args = parser.parse_args(argv)
    works, peers = choose(args.only, PEERS_WATCHED)

    begin, rounds = time.perf_counter(), []
    longest = 0.0
    for turn in range(args.repeats):
        started = time.perf_counter()
        if turn and started - begin + longest > args.seconds:
            print(f"{turn} rounds instead of {args.repeats}: this machine is slow")
            break
        for work in works:
            doing = [peer for peer in peers if PEERS[peer].does(work)]
            rounds.append(run_round(work, doing, turn=turn, toy=args.toy))
        longest = max(longest, time.perf_counter() - started)

    found = report.ratios(rounds)
    if not all(report.is_quiet(one, *one["busy"]) for one in rounds):
        print("other programs took more than a tenth of the cores' time meanwhile")
    for one in rounds:
        for peer, shown in one["failed"].items():
            print(f"{one['work']} {peer} FAILED\n{shown}", file=sys.stderr)
    if args.record:
        record: dict[str, Any] = {"machine": report.describe_machine(), "ratios": found}
        args.recorded.write_text(json.dumps(record, indent=1) + "\n")
        print(f"recorded in {args.recorded}")
    recorded = {}
    if args.recorded.exists():
        recorded = json.loads(args.recorded.read_text())["ratios"]
    else:
        print(f"nothing is recorded in {args.recorded} to compare with: use --record")
    rows = compare(found, recorded)
    print("| work | loop | of E | recorded | |\n|---|---|---|---|---|")
    for work, peer, ratio, before, worse in rows:
        old = "" if before is None else f"{before:.2f}"
        print(f"| {work} | {peer} | {ratio:.2f} | {old} | {'WORSE' * worse} |")
    is_worse = any(worse for *_, worse in rows)
    if is_worse:
        print(
            "run it again before you believe it: so few rounds vary, see docs/speed.md"
        )
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
