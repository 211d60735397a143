"""Checks every statement of Section 5 and supplement 2 numerically and prints a table of verdicts.

    python -m theory.check                        # under half a minute; writes check.json and six figures to runs/theory
    python -m theory.check --out theory/figures   # renews what theory/README.md shows

A ratio is bound / measured: below 1 the statement is violated; each row shows the worst ratio found, 'vacuous' means true
but saying nothing, 'ours' stands on no page of the paper. A violated printed statement is a finding, not an error: the exit
code is 1 only when a verdict differs from the documented one, or when a corrected or sharp statement is violated.
"""

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from theory import figures, statements


def table(rows):
    """The rows as text, one line each."""
    lines = [f"{'statement':44}{'printed':>9}{'ratio':>10}{'corrected':>11}{'ratio':>7}{'sharp':>7}  note"]
    for row in rows:
        shown = {key: f"{x:.3g}" if isinstance(x, float) else x or "" for key, x in row.items()}
        lines.append("{statement:44}{printed:>9}{printed_ratio:>10}{corrected:>11}".format(**shown))
        lines[-1] += "{corrected_ratio:>7}{sharp_ratio:>7}  {note}".format(**shown)
    return "\n".join(lines)


def run(out):
    """Runs every check and figure into the folder `out`; returns the exit code."""
    rows = [row for section in tqdm(statements.SECTIONS, desc="checks") for row in section()]
    for name in tqdm(figures.FIGURES, desc="figures"):
        figures.save(out / name)
    (out / "check.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    wrong = [row["statement"] for row in rows if row["printed"] != row["documented"] or row["corrected"] == "violated"]
    print(f"{len(rows)} statements; " + (f"NOT as documented: {'; '.join(wrong)}" if wrong else "all as documented"))
    return 1 if wrong else 0


def main(argv=None):
    """Returns the exit code; SystemExit with code 2 on bad usage, with 130 and one line on Ctrl-C."""
    parser = argparse.ArgumentParser("python -m theory.check", description=__doc__.splitlines()[0])
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), metavar="DIR", help="for check.json and the figures")
    out = parser.parse_args(argv).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "check.json").touch()
        return run(out)
    except OSError as error:
        parser.error(f"cannot write to {out}: {error.strerror}")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    sys.exit(main())
