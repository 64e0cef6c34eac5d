"""Run a notebook's cells as a kernel does; keep in it what they print and draw: `make notebook`.

    python tests/helpers/notebook_outputs.py recipes/fp16_on_a_t4.ipynb

Text of stderr is left out: progress bars and warnings, which hold paths of this machine.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def pictures() -> list[dict[str, Any]]:
    """The open figures, each as a notebook holds it; they are closed."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=80)
        data = {"image/png": base64.b64encode(png.getvalue()).decode()}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return found


def main(path: Path) -> None:
    notebook, names = json.loads(path.read_text("utf-8")), {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        stream = {"output_type": "stream", "name": "stdout", "text": text}
        cell["execution_count"] = count
        cell["outputs"] = [*pictures(), *([stream] if text else [])]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
