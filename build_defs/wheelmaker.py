"""Writes a PEP 427 wheel from a JSON spec, the same bytes for the same content: wheelmaker SPEC.json.

`write(spec)` is the whole of it. Nothing of the machine enters: entries are sorted, their time is 1980-01-01, their
mode 0644, and the order of the spec's own lists does not matter.
"""

import base64
import hashlib
import json
import pathlib
import re
import sys
import zipfile

SINGLE = (
  ('Author', 'author'),
  ('Home-page', 'homepage'),
  ('License', 'license'),
  ('Summary', 'summary'),
  ('Requires-Python', 'python_requires'),
)
CONTENT_TYPES = {'.md': 'text/markdown', '.rst': 'text/x-rst'}


def write(spec):
  """Writes the wheel that `spec` (the fields that packaging.bzl gives) describes to spec['out']."""
  entries = {}
  for short, path in spec['files']:
    for prefix in spec['strip_path_prefixes']:
      if short.startswith(prefix):
        short = short[len(prefix) :].lstrip('/')
        break
    entries[short] = pathlib.Path(path).read_bytes()
  distribution = re.sub(r'[-_.]+', '_', spec['name']).lower()
  info = f'{distribution}-{spec["version"]}.dist-info'
  for path, name in spec['extra_distinfo'].items():
    entries[f'{info}/{name}'] = pathlib.Path(path).read_bytes()
  if spec['entry_points']:
    entries[f'{info}/entry_points.txt'] = entry_points(spec['entry_points'])
  entries[f'{info}/METADATA'] = metadata(spec)
  entries[f'{info}/WHEEL'] = (
    f'Wheel-Version: 1.0\nGenerator: maxtext-py-wheel 1\nRoot-Is-Purelib: true\nTag: {spec["tag"]}\n'.encode()
  )
  # The record comes last, as PEP 427 recommends, and names itself without a hash.
  record = [f'{name},sha256={digest(data)},{len(data)}' for name, data in sorted(entries.items())]
  entries = {**dict(sorted(entries.items())), f'{info}/RECORD': '\n'.join([*record, f'{info}/RECORD,,', '']).encode()}
  with zipfile.ZipFile(spec['out'], 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, data in entries.items():
      entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
      entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
      archive.writestr(entry, data)


def metadata(spec):
  lines = ['Metadata-Version: 2.1', f'Name: {spec["name"]}', f'Version: {spec["version"]}']
  lines += [f'{key}: {spec[field]}' for key, field in SINGLE if spec[field]]
  lines += [f'Classifier: {value}' for value in spec['classifiers']]
  lines += [f'Project-URL: {key}, {value}' for key, value in sorted(spec['project_urls'].items())]
  lines += [f'Requires-Dist: {value}' for value in spec['requires']]
  for extra, values in sorted(spec['extra_requires'].items()):
    lines.append(f'Provides-Extra: {extra}')
    for value in values:
      requirement, _, marker = (part.strip() for part in value.partition(';'))
      lines.append(f'Requires-Dist: {requirement}; ' + (f'({marker}) and ' if marker else '') + f"extra == '{extra}'")
  body = ''
  if spec['description']:
    path = pathlib.Path(spec['description'])
    lines.append(f'Description-Content-Type: {CONTENT_TYPES.get(path.suffix, "text/plain")}')
    body = path.read_text(encoding='utf-8')
  return ('\n'.join(lines) + '\n\n' + body).encode()


def entry_points(groups):
  return ''.join(
    f'[{group}]\n' + ''.join(f'{line}\n' for line in lines) + '\n' for group, lines in sorted(groups.items())
  ).encode()


def digest(data):
  return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()


if __name__ == '__main__':
  write(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding='utf-8')))
