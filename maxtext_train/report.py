"""report.html: the curves and the settings of a run in one file that needs no network.

Drawn by Plotly in the reader's browser. Its script is taken from the plotly distribution and put into the page as it
is; the Python half of plotly is not imported, because it takes longer than writing the page.
"""

import html
import importlib.resources
import json
import os
import pathlib
from typing import Any

CURVES = (
  ('loss', 'Loss', 'nats a token'),
  ('learning_rate', 'Learning rate', ''),
  ('grad_norm', 'Gradient norm', 'before the clip'),
  ('tokens_per_second', 'Throughput', 'tokens a second'),
)
_POINTS = 2000  # a curve of more points is thinned: a screen has no more columns

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.4rem; }} table {{ border-collapse: collapse; }} td {{ padding: .1rem 1rem .1rem 0; }}
.curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }}
.curve {{ height: 320px; }} pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; }}
</style>
<script>{script}</script></head>
<body><h1>{title}</h1><table>{facts}</table>
<div class="curves">{divs}</div>
<h2>Settings</h2><pre>{settings}</pre>
<script>
const figures = {figures};
const done = figures.map(f => Plotly.newPlot(f.id, f.data, f.layout, {{responsive: true, displaylogo: false}}));
Promise.all(done).then(() => document.body.dataset.drawn = done.length);
</script></body></html>
"""


def write(folder: pathlib.Path, facts: dict[str, Any]) -> pathlib.Path:
  """RUN/report.html from RUN/metrics.jsonl, eval.jsonl and config.txt. `facts`: what to say above the curves."""
  rows, evals = read(folder / 'metrics.jsonl'), read(folder / 'eval.jsonl')
  figures = [_figure(name, title, unit, rows, evals) for name, title, unit in CURVES]
  script = (importlib.resources.files('plotly') / 'package_data' / 'plotly.min.js').read_text(encoding='utf-8')
  text = _PAGE.format(
    title=html.escape(f'Run {folder.name}'),
    script=script,
    facts=''.join(f'<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>' for k, v in facts.items()),
    divs=''.join(f'<div class="curve" id="{name}"></div>' for name, _, _ in CURVES),
    settings=html.escape((folder / 'config.txt').read_text(encoding='utf-8')),
    figures=json.dumps(figures).replace('</', '<\\/'),
  )
  target = folder / 'report.html'
  temporary = target.with_suffix('.part')
  try:
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, target)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise OSError(error.errno, error.strerror, str(target)) from error
  return target


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a JSON-lines file, half a line at its end (of a process that was killed) left out; [] without one."""
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  return [json.loads(line) for line in text[: text.rfind('\n') + 1].splitlines()]


def _figure(name, title, unit, rows, evals):
  thin = rows[:: max(1, len(rows) // _POINTS)]
  data = [{'x': [r['step'] for r in thin], 'y': [r.get(name) for r in thin], 'name': 'training', 'mode': 'lines'}]
  if name == 'loss' and evals:
    curve = {'x': [r['step'] for r in evals], 'y': [r['eval_loss'] for r in evals]}
    data.append({**curve, 'name': 'held out', 'mode': 'lines+markers'})
  layout = {
    'title': {'text': title},
    'xaxis': {'title': {'text': 'step'}},
    'yaxis': {'title': {'text': unit}},
    'margin': {'l': 60, 'r': 20, 't': 50, 'b': 45},
    'showlegend': len(data) > 1,
    'legend': {'x': 1, 'xanchor': 'right', 'y': 1},
  }
  return {'id': name, 'data': data, 'layout': layout}
