"""report.html in a real browser, without a network."""

import json
import re
import shutil
import subprocess

import pytest

from maxtext_train import report

pytestmark = pytest.mark.slow


def test_the_curves_are_drawn(tmp_path):
  """A headless Chromium draws five curves and the settings; the page asks for nothing outside of itself."""
  browser = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
  assert browser, 'this test needs Chromium: apt-get install chromium'
  rows = [
    {'step': i, 'loss': 5 / i, 'learning_rate': 1e-3, 'grad_norm': 1.0, 'tokens_per_second': 900.0 + i}
    for i in range(1, 51)
  ]
  rows[7]['loss'] = None  # a step without weight leaves a gap
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  evals = [{'step': i, 'eval_loss': 6 / i, 'eval_tokens': 100.0} for i in (10, 50)]
  (tmp_path / 'eval.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in evals))
  (tmp_path / 'config.txt').write_text('name = "a < b </script> & c"\n')
  path = report.write(tmp_path, {'Model': 'tiny <&>'})
  done = subprocess.run(
    [browser, '--headless', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=20000', '--dump-dom',
     f'--user-data-dir={tmp_path / "profile"}', '--host-resolver-rules=MAP * ~NOTFOUND', path.as_uri()],
    capture_output=True, text=True, timeout=240, check=True,
  )  # fmt: skip
  page = done.stdout
  assert 'data-drawn="4"' in page  # set when Plotly has drawn all of them
  titles = re.findall(r'class="gtitle"[^>]*>([^<]*)', page)
  assert titles == ['Loss', 'Learning rate', 'Gradient norm', 'Throughput']
  assert 'held out' in page and page.count('class="scatterlayer') == 4
  assert len(re.findall(r'class="trace scatter', page)) == 5
  assert 'tiny &lt;&amp;&gt;' in page and 'a &lt; b &lt;/script&gt; &amp; c' in page
  source = path.read_text()
  assert not re.search(r'<(script|link|img)[^>]*(src|href)=', source.split('<body>')[0].split('<script>')[0])
