"""Counts test cases: count.py --steps PASSED FAILED RESULTS..., where RESULTS are Bazel event files and junit files.

Bazel's own results name the test.xml of every test and shard that belongs to the run, cached or not; what lies in
bazel-testlogs of targets that are gone is not counted. Of one test in several runs the last counts. Python 3.9 will do.
"""

import json
import pathlib
import sys
import urllib.parse
from xml.etree import ElementTree


def _junit_files(results):
  """{(label, shard): test.xml} and {label: why a test has none}."""
  files, broken = {}, {}
  for path in results:
    if path.suffix == '.xml':
      files[str(path), 0] = path
      continue
    for line in path.read_text().splitlines():
      event = json.loads(line)
      at = event['id'].get('testResult')
      for output in event.get('testResult', {}).get('testActionOutput', []):
        if output['name'] == 'test.xml':
          files[at['label'], at.get('shard', 0)] = pathlib.Path(
            urllib.parse.unquote(urllib.parse.urlparse(output['uri']).path)
          )
      summary = event.get('testSummary', {})
      if summary and summary['overallStatus'] not in ('PASSED', 'FLAKY', 'FAILED'):
        broken[event['id']['testSummary']['label']] = summary['overallStatus']
  return files, broken


def main(passed, failed, results):
  """Prints each case that failed or was skipped and the closing line; 1 where anything failed."""
  files, broken = _junit_files([path for path in map(pathlib.Path, results) if path.exists()])
  skipped = 0
  for (label, _), path in sorted(files.items()):
    for case in ElementTree.parse(path).iter('testcase'):
      kinds = {child.tag for child in case}
      name = f'{label} {case.get("name")}'
      if kinds & {'failure', 'error'}:
        failed += 1
        print(f'failed: {name}')
      elif 'skipped' in kinds:
        skipped += 1
        print(f'skipped: {name}: {case.find("skipped").get("message")}')
      else:
        passed += 1
  for label, why in sorted(broken.items()):
    print(f'{why}: {label}')
  print(f'{passed} passed, {failed} failed' + (f', {skipped} skipped' if skipped else ''))
  return int(failed > 0)


if __name__ == '__main__':
  sys.exit(main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
