"""python tests/run_lesson.py [COPY.ipynb]

Runs the cells of examples/lesson.ipynb as Jupyter would, and writes what they print and show into
the file, or into a copy. It needs no Jupyter. Run it after you have changed the notebook.
"""

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import matplotlib

LESSON = Path(__file__).resolve().parent.parent / "examples" / "lesson.ipynb"


def run(cells: list[dict]) -> list[list[dict]]:
    """Executes code cells in order, in their folder. Returns the outputs of each: text, pictures.

    Raises what a cell raises.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(cells):
        code = compile("".join(cell["source"]), f"code cell {number}", "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        of_cell = []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            of_cell.append({"name": "stdout", "output_type": "stream", "text": lines})
        for figure in map(plt.figure, plt.get_fignums()):
            of_cell.append(picture(figure))
        plt.close("all")
        outputs.append(of_cell)
    return outputs


def picture(figure) -> dict:
    """Returns a figure as an output that holds a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    data = {"image/png": base64.b64encode(png.getvalue()).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    notebook = json.loads(LESSON.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    target = Path(sys.argv[1] if len(sys.argv) > 1 else LESSON).resolve()
    os.chdir(LESSON.parent)
    for number, (cell, outputs) in enumerate(zip(cells, run(cells), strict=True), 1):
        cell |= {"execution_count": number, "outputs": outputs}
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
