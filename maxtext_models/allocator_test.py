import json
import os
import pathlib
import subprocess
import sys

import pytest

from maxtext_layers import config
from maxtext_models import allocator

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='allocators are chosen on Linux only')

PROGRAM = """
import json, os, resource, sys
from absl import flags
from maxtext_models import allocator, program
TEXT = flags.DEFINE_string('text', '', '')
FAULTS = flags.DEFINE_bool('faults', False, '')
CODE = flags.DEFINE_integer('code', 0, '')

def main():
  program.run(_main, positional=True)

def _main(args):
  from maxtext_layers import config
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  if FAULTS.value:
    for _ in range(10):
      block = b'x' * (40 << 20)
      del block
  faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
  maps = open('/proc/self/maps').read()
  print(json.dumps(dict(
    now=allocator.current(), maps=maps, argv=sys.argv, args=args, text=TEXT.value, pid=os.getpid(), faults=faults,
    stdin='' if sys.stdin.isatty() else sys.stdin.read(), name=__name__, flags=[sys.flags.optimize, sys.path[0]],
    env={n: v for n, v in os.environ.items() if n.startswith(('MALLOC', 'GLIBC', 'LD_', 'TCMALLOC', 'MAXTEXT'))})))
  return CODE.value

if __name__ == '__main__':
  main()
"""


@pytest.fixture(scope='module')
def libraries(tmp_path_factory):
  """A harmless library under the name of each allocator: how programs start does not hang on what is installed."""
  folder = tmp_path_factory.mktemp('lib')
  with open('/proc/self/maps') as maps:
    harmless = next(line.split()[-1] for line in maps if '/libm.so' in line or '/libm-' in line)
  for name in ('libjemalloc.so.2', 'libtcmalloc_minimal.so.4'):
    (folder / name).write_bytes(pathlib.Path(harmless).read_bytes())
  return folder


@pytest.fixture
def run(tmp_path, libraries):
  def run(*arguments, how=None, fake=True, stdin='', **environment):
    (tmp_path / 'shown.py').write_text(PROGRAM)
    clean = {n: v for n, v in os.environ.items() if not n.startswith(('MALLOC', 'GLIBC', 'LD_', 'TCMALLOC', 'JAX'))}
    clean |= {'PYTHONPATH': ':'.join([str(ROOT), *filter(None, sys.path)]), 'JAX_PLATFORMS': 'cpu'} | environment
    if fake:
      clean['LD_LIBRARY_PATH'] = str(libraries)
    process = subprocess.Popen(
      [sys.executable, *(how or ['shown.py']), *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=clean,
      cwd=tmp_path,
    )
    out, err = process.communicate(stdin, timeout=60)
    shown = json.loads(out) if out else {}
    return process, shown, err

  return run


def test_auto_takes_the_best_and_says_so_once(run, libraries):
  process, shown, err = run()
  library = str(libraries / 'libjemalloc.so.2')
  assert shown['now']['name'] == 'jemalloc'
  assert shown['now']['library'] == library and library in shown['maps']
  assert 'thp:always' in shown['now']['settings']['MALLOC_CONF']
  assert err == f'allocator: jemalloc ({library}); the program started again for it, --allocator=system prevents that\n'
  assert shown['pid'] == process.pid  # the same process for whoever sends it signals
  assert set(shown['env']) == {'LD_LIBRARY_PATH'}  # programs that it starts are not under it


@pytest.mark.parametrize('name', ['tcmalloc', 'huge_pages'])
def test_a_named_one(run, name):
  if name == 'huge_pages' and (reason := allocator._missing(name)):  # needs glibc, and a kernel that gives huge pages
    pytest.skip(reason)
  _, shown, err = run(f'--allocator={name}')
  assert shown['now']['name'] == name
  assert err.startswith(f'allocator: {name}') and err.count('\n') == 1


def test_system_is_left_alone(run):
  _, shown, err = run('--allocator', 'system')
  assert (shown['now']['name'], err) == ('system', '')
  assert 'jemalloc' not in shown['maps']


def test_a_named_one_that_is_not_there_says_what_brings_it(run, monkeypatch):
  if allocator._library('tcmalloc'):  # it is installed here: ask the function, with the folders that it knows gone
    monkeypatch.setattr(allocator, '_FOLDERS', ())
    monkeypatch.setattr(allocator, '_cached', lambda files: [])
    with pytest.raises(config.Error, match=r'^--allocator=tcmalloc: .* not installed; it is in libtcmalloc-minimal4'):
      allocator.environment('tcmalloc')
  else:
    process, _, err = run('--allocator=tcmalloc', fake=False)
    assert process.returncode == 2
    assert err.startswith('error: --allocator=tcmalloc: libtcmalloc_minimal.so.4 is not installed; it is in ')


def test_the_command_line_survives(run):
  odd = ['--text=a "b" \'c\' $d', 'e f', '', '-é\n']
  _, shown, _ = run('--', 'x y', '--allocator=system', stdin='one\ntwo\n')
  assert shown['args'] == ['x y', '--allocator=system'] and shown['now']['name'] == 'jemalloc'
  assert shown['stdin'] == 'one\ntwo\n'
  _, shown, _ = run(odd[0], '--', *odd[1:])
  assert shown['text'] == 'a "b" \'c\' $d'
  assert shown['argv'][1:] == [odd[0], '--', *odd[1:]]


def test_a_module_is_started_again_as_a_module(run, tmp_path):
  _, shown, _ = run(how=['-O', '-m', 'shown'])
  assert shown['now']['name'] == 'jemalloc'
  assert shown['name'] == '__main__' and shown['flags'] == [1, str(tmp_path)]


def test_a_console_script(run):
  _, shown, _ = run('--text=a b', how=['-c', 'import shown; shown.main()'])
  assert (shown['now']['name'], shown['name'], shown['text']) == ('jemalloc', 'shown', 'a b')


def test_the_exit_code_passes(run):
  process, shown, _ = run('--code=7')
  assert (process.returncode, shown['now']['name']) == (7, 'jemalloc')


def test_a_wrong_flag_is_answered_by_one_line(run):
  process, _, err = run('--tex=1')
  assert (process.returncode, err) == (2, "error: unknown flag --tex; did you mean '--text'?\n")


def test_what_the_user_preloads_stays(run, libraries):
  other = libraries / 'libother.so'
  other.write_bytes((libraries / 'libjemalloc.so.2').read_bytes())
  _, shown, _ = run(LD_PRELOAD=str(other), MALLOC_CONF='narenas:1')
  assert shown['now']['settings']['LD_PRELOAD'] == f'{other}:{libraries / "libjemalloc.so.2"}'
  assert shown['now']['settings']['MALLOC_CONF'].endswith(',narenas:1')
  assert (shown['env']['LD_PRELOAD'], shown['env']['MALLOC_CONF']) == (str(other), 'narenas:1')


def test_an_allocator_of_the_user_is_kept(run, libraries):
  own = str(libraries / 'libjemalloc.so.2')
  _, shown, err = run(LD_PRELOAD=own)
  assert (shown['now']['name'], shown['now']['why'], err) == (
    'preloaded',
    f'LD_PRELOAD brings one already: {own}',
    '',
  )
  process, _, err = run('--allocator=tcmalloc', LD_PRELOAD=own)
  assert process.returncode == 2
  assert err == f'error: --allocator=tcmalloc: LD_PRELOAD brings one already: {own}\n'


def test_never_a_third_start(run):
  told = {'name': 'jemalloc', 'asked': 'auto', 'library': '/no/such.so', 'settings': {}, 'before': {}}
  _, shown, err = run(MAXTEXT_ALLOCATOR=json.dumps(told))  # as if preloading had not worked
  assert shown['now'] == {'name': 'system', 'why': '/no/such.so did not load'}
  assert err == '' and set(shown['env']) == {'LD_LIBRARY_PATH'}


def test_a_program_from_standard_input_is_not_started_again(run):
  _, shown, err = run(how=['-'], stdin=PROGRAM)
  assert (shown['now']['name'], err) == ('system', '')
  assert 'cannot read it again' in shown['now']['why']


def test_another_program_in_this_process_is_not_started_again(run):
  code = 'import sys, shown; sys.argv = {}; shown.main()'
  for argv in (['other'], ['other', 'more'], ['-c', 'a']):
    _, shown, err = run('b', how=['-c', code.format(argv)])
    assert (shown['now']['name'], err) == ('system', '')
    assert 'not the one' in shown['now']['why']


def test_on_an_accelerator_the_system_one(run, monkeypatch, tmp_path):
  _, shown, _ = run(JAX_PLATFORMS='cuda,cpu')
  assert shown['now'] == {'name': 'system', 'why': 'JAX_PLATFORMS=cuda,cpu'}
  for name in ('JAX_PLATFORMS', 'JAX_PLATFORM_NAME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(allocator, '_NODES', (str(tmp_path / 'nvidia[0-9]*'),))
  monkeypatch.setattr(allocator, '_plugins', lambda: ['jax_cuda13'])
  assert allocator._accelerator() == ''  # a plugin without a device
  (tmp_path / 'nvidia0').touch()
  assert allocator._accelerator() == f'an accelerator is there: {tmp_path}/nvidia0, jax_cuda13'
  monkeypatch.setattr(allocator, '_plugins', lambda: [])
  assert allocator._accelerator() == ''  # a device that this jax cannot use


def test_a_plugin_is_found_as_jax_finds_it(monkeypatch, tmp_path):
  (tmp_path / 'jax_plugins' / 'xla_other').mkdir(parents=True)
  (tmp_path / 'jax_plugins' / 'xla_other' / '__init__.py').touch()
  (tmp_path / 'other-1.dist-info').mkdir()
  (tmp_path / 'other-1.dist-info' / 'METADATA').write_text('Metadata-Version: 2.1\nName: other\nVersion: 1\n')
  (tmp_path / 'other-1.dist-info' / 'entry_points.txt').write_text('[jax_plugins]\nby_entry_point = other\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  assert {'xla_other', 'by_entry_point'} <= set(allocator._plugins())


def test_a_library_for_another_processor_is_passed_over(tmp_path, libraries, monkeypatch):
  wrong = bytearray((libraries / 'libjemalloc.so.2').read_bytes()[:64])
  wrong[18:20] = b'\xf3\x01'
  (tmp_path / 'libjemalloc.so.2').write_bytes(wrong)
  monkeypatch.setenv('LD_LIBRARY_PATH', f'{tmp_path}:{libraries}')
  assert allocator._library('jemalloc') == str(libraries / 'libjemalloc.so.2')


@pytest.mark.parametrize('name', ['huge_pages', 'jemalloc', 'tcmalloc'])
def test_page_faults_fall(run, name):
  """Ten blocks of 40 MB, written once each, are 102,400 pages of 4 KiB."""
  if reason := allocator._missing(name):  # installed in CI; the reason names what installs it
    pytest.skip(reason)
  with open('/sys/kernel/mm/transparent_hugepage/enabled') as file:
    always = '[always]' in file.read()
  _, shown, _ = run(f'--allocator={name}', '--faults', fake=False)
  assert shown['now']['name'] == name
  assert shown['faults'] < 102_400 / 5  # at most the first block is mapped in small pages
  _, shown, _ = run('--allocator=system', '--faults', fake=False)
  assert always or shown['faults'] > 102_400 * 0.9
