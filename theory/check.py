"""Check every statement of Section 5 and supplement 2, and print a table of verdicts.

    python -m theory.check                        # check.json and figures in runs/theory
    python -m theory.check --out theory/figures   # renews what theory/README.md shows

A violated statement of the paper is a finding, not an error. The exit status is 1 if a verdict is
not the documented one, or if a corrected or sharp statement is violated.
"""

import argparse
import json
import sys
from pathlib import Path

from theory import (
    assumption1,
    easy_samples,
    lemma5,
    lemmas,
    remarks,
    report,
    supplement,
    theorem1,
    theorem2,
)
from theory.beyond import (
    attained,
    drift_law,
    floor,
    noise_law,
    theorem1_random,
    theorem2_random,
)

STATEMENTS = (  # in the paper's order
    easy_samples,
    supplement,
    assumption1,
    theorem1,
    theorem1_random,
    floor,
    attained,
    remarks,
    noise_law,
    drift_law,
    theorem2,
    theorem2_random,
    lemmas,
    lemma5,
)
FIGURES = {
    "spectra.png": easy_samples.draw,
    "bounds.png": theorem1.draw,
    "floor.png": floor.draw,
    "attained.png": attained.draw,
    "noise_law.png": noise_law.draw,
    "kink_law.png": drift_law.draw_kink,
    "smooth_law.png": drift_law.draw_smooth,
    "ergodic.png": theorem2.draw,
}


def run(out):
    """Run every check, write check.json and the figures to `out`, and return the exit status."""
    rows = []
    print(report.HEADER)
    for statement in STATEMENTS:
        for row in statement.check():
            print(report.line(row), flush=True)
            rows.append(row)
    for name, draw in FIGURES.items():
        report.save(out / name, draw)
    (out / "check.json").write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row["statement"] for row in rows if is_news(row)]
    outcome = f"NOT as documented: {'; '.join(wrong)}" if wrong else "all as documented"
    print(f"{len(rows)} statements; {outcome}")
    return 1 if wrong else 0


def is_news(row):
    """Whether the verdict is not the documented one, or a corrected statement is violated."""
    return row["printed"] != row["documented"] or row["corrected"] == "violated"


def main(argv=None):
    """Return the exit status. SystemExit with status 2 for bad usage, with 130 for Ctrl-C."""
    parser = argparse.ArgumentParser("python -m theory.check", description=__doc__.splitlines()[0])
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    where = "folder for check.json and the figures (default: runs/theory)"
    parser.add_argument("--out", type=Path, default=report.OUT, help=where)
    out = parser.parse_args(argv).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "check.json").touch()
        return run(out)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}; choose a folder that can be written")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    sys.exit(main())
