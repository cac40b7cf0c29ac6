"""The host's memory allocator, chosen before the process has touched any memory.

XLA's buffers on a CPU are tens of megabytes large. The C library maps them anew every step and gives them back, so
that a step of a 135M-parameter model takes 434,000 page faults, each a way into the kernel and back. An allocator that
keeps its memory, in huge pages, takes none. It must be there when the process starts, hence a program that wants one
starts itself again, once.

Measured on 2 cores of an AMD EPYC (training tokens/s of a hand-written step, 20M / 135M parameters): system 1475 / 136,
huge_pages 1722 / 152, tcmalloc 1720 / 158, jemalloc 1854 / 158. The price is memory that is kept: with jemalloc the
peak is 2.3 / 4.4 GB, not 1.5 / 3.8. All of it is the side `twin` of, in a checkout:

    python -m tests.benchmarks.train_ratio --workload=W1|W2 --allocator=NAME --rounds=1

Reading order: `NAMES`, `settle` (what a program calls first), `current` (what the manifest says), `environment`,
`_accelerator`.
"""

from collections.abc import Sequence
import glob
import json
import os
import sys
import threading
from typing import Any

NAMES = ('auto', 'system', 'huge_pages', 'jemalloc', 'tcmalloc')

_BEST_FIRST = ('jemalloc', 'tcmalloc', 'huge_pages')
_GUARD = 'MAXTEXT_ALLOCATOR'  # what the first start tells the second

# What each reads when the process starts. They belong to the figures above: change one and measure again.
_SETTINGS = {
  'huge_pages': {
    'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
    'MALLOC_MMAP_MAX_': '0',
    'MALLOC_TRIM_THRESHOLD_': '9223372036854775807',
    'MALLOC_TOP_PAD_': '268435456',
  },
  'jemalloc': {'MALLOC_CONF': 'dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0,thp:always,metadata_thp:auto'},
  'tcmalloc': {'TCMALLOC_RELEASE_RATE': '0'},
}
_JOINED = {'GLIBC_TUNABLES': ':', 'MALLOC_CONF': ','}  # lists, in which the later entry wins: the user's stand last
_LIBRARIES = {
  'jemalloc': ('libjemalloc.so.2',),
  'tcmalloc': ('libtcmalloc_minimal.so.4', 'libtcmalloc.so.4'),
}
_PACKAGES = {
  'jemalloc': 'libjemalloc2 (Debian, Ubuntu) or jemalloc (Fedora, Arch, conda)',
  'tcmalloc': 'libtcmalloc-minimal4 (Debian, Ubuntu) or gperftools (Fedora, Arch, conda)',
}
_FOLDERS = ('/usr/local/lib', '/usr/lib/*-linux-gnu', '/usr/lib64', '/usr/lib', '/lib/*-linux-gnu', '/lib64', '/lib')
_KNOWN = ('jemalloc', 'tcmalloc', 'mimalloc', 'tbbmalloc', 'snmalloc', 'rpmalloc', 'hoard')
# Device files of NVIDIA, AMD, Google (accel: TPU v4 and older, vfio: newer), AWS, Intel and others.
_NODES = ('/dev/nvidia[0-9]*', '/dev/kfd', '/dev/accel*', '/dev/vfio/[0-9]*', '/dev/neuron*', '/dev/dri/renderD*')

_now: dict[str, Any] = {'name': 'system', 'why': 'the process is not a program of its own'}


def settle(argv: Sequence[str]) -> None:
  """Starts this process again under the allocator that `argv` asks for, unless it runs under it or none is wanted.

  To be called once, first thing: what the process has done before is done twice.

  Raises:
    config.Error: an allocator is named that is not there, or that cannot be used here.
  """
  global _now
  if told := os.environ.pop(_GUARD, None):  # the second start; there is never a third
    _now = _arrived(json.loads(told))
    return
  asked = named(argv)
  if asked == 'system' or asked not in NAMES:  # what is no name the flag parser tells the user
    _now = {'name': 'system', 'why': f'--allocator={asked}'}
    return
  obstacle = _obstacle()
  if asked != 'auto':
    if obstacle:
      raise _error(f'--allocator={asked}: {obstacle}')
    _restart(asked, asked)
  elif obstacle or (obstacle := _accelerator()):
    _now = {'name': 'preloaded' if 'LD_PRELOAD' in obstacle else 'system', 'why': obstacle}
  elif (found := best()) != 'system':
    _restart(found, asked)
  else:
    _now = {'name': 'system', 'why': 'no other is installed'}


def named(argv: Sequence[str]) -> str:
  """The value of the last `--allocator` in argv, before flags are parsed; 'auto' where there is none."""
  value, rest = 'auto', iter(argv[1:])
  for argument in rest:
    if argument == '--':
      break
    flag, equals, given = argument.partition('=')
    if flag in ('--allocator', '-allocator'):
      value = given if equals else next(rest, '')
  return value


def current() -> dict[str, Any]:
  """The allocator this process runs under, for a manifest: `name`, `why`; `library`, `settings` if it started again."""
  return dict(_now)


def announcement() -> str:
  """One line for the user about what `settle` did, or '' if that was nothing."""
  if 'settings' not in _now:
    return ''
  library = f' ({_now["library"]})' if _now['library'] else ''
  return f'allocator: {_now["name"]}{library}; the program started again for it, --allocator=system prevents that'


def best() -> str:
  """The fastest of those that are installed: what `auto` takes on a CPU."""
  return next((name for name in _BEST_FIRST if not _missing(name)), 'system')


def environment(name: str) -> dict[str, str]:
  """What a process must find in its environment to run under allocator `name`, with what the user has there kept.

  Raises:
    config.Error: it is not there.
  """
  if name == 'system':
    return {}
  if obstacle := _missing(name):
    raise _error(f'--allocator={name}: {obstacle}')
  wanted = {}
  for variable, value in _SETTINGS[name].items():
    old = os.environ.get(variable)
    wanted[variable] = f'{value}{_JOINED[variable]}{old}' if old and variable in _JOINED else old or value
  if library := _library(name):
    wanted['LD_PRELOAD'] = ':'.join(filter(None, [os.environ.get('LD_PRELOAD'), library]))
  return wanted


def _restart(name, asked):
  """Does not return, unless the system refuses."""
  settings = environment(name)
  before = {variable: os.environ.get(variable) for variable in settings}
  told = {'name': name, 'asked': asked, 'library': _library(name), 'settings': settings, 'before': before}
  sys.stdout.flush()
  sys.stderr.flush()
  try:
    os.execve(
      sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings, _GUARD: json.dumps(told)}
    )
  except OSError as error:
    raise _error(f'--allocator={name}: cannot start again: {error}; --allocator=system works') from None


def _arrived(told):
  """The second start: what `current` says. The environment is the user's again: programs that we start choose anew.

  Like all of `settle` it runs in main() only.
  """
  for variable, old in told.pop('before').items():
    if old is None:
      os.environ.pop(variable, None)
    else:
      os.environ[variable] = old
  name, library = told['name'], told['library']
  if library and os.path.realpath(library) not in _mapped():
    if told['asked'] != 'auto':
      raise _error(f'--allocator={name}: {library} did not load')
    return {'name': 'system', 'why': f'{library} did not load'}
  return {**told, 'why': f'--allocator={told.pop("asked")}'}


def _obstacle():
  """Why no allocator can be chosen here, or ''."""
  if sys.platform != 'linux':
    return f'works on Linux, this is {sys.platform}'
  preloaded = [entry for entry in os.environ.get('LD_PRELOAD', '').replace(':', ' ').split() if _is_allocator(entry)]
  if preloaded:
    return f'LD_PRELOAD brings one already: {preloaded[0]}'
  if 'jax' in sys.modules or threading.active_count() > 1:
    return 'the process is at work already and cannot start again'
  if not sys.executable or not sys.orig_argv[1:] or sys.argv[0] in ('', '-'):
    return 'Python reads the program from its input and cannot read it again'
  if not _as_started():
    return 'the command line is not the one that the process was started with'
  return ''


def _as_started():
  """Whether starting again with `sys.orig_argv` runs this program: in a test runner it would run the tests again."""
  count = len(sys.orig_argv) - len(sys.argv) + 1
  head, tail = sys.orig_argv[:count], sys.orig_argv[count:]
  begin = head[-1] == sys.argv[0] or head[-2:-1] in (['-m'], ['-c']) or head[-1].startswith(('-m', '-c'))
  return tail == sys.argv[1:] and begin


def _missing(name):
  """Why `name` is not there and what would help, or ''."""
  if name in _LIBRARIES:
    return '' if _library(name) else f'{_LIBRARIES[name][0]} is not installed; it is in {_PACKAGES[name]}'
  try:
    libc, _, version = os.confstr('CS_GNU_LIBC_VERSION').partition(' ')
  except (ValueError, AttributeError):
    libc, version = 'another C library', ''
  if libc != 'glibc' or tuple(map(int, version.split('.')[:2])) < (2, 35):
    return f'needs glibc 2.35 or newer, this is {libc} {version}'.strip()
  try:
    with open('/sys/kernel/mm/transparent_hugepage/enabled') as file:
      pages = file.read().strip()
  except OSError:
    pages = 'no such file'
  if '[always]' in pages or '[madvise]' in pages:
    return ''
  return f'/sys/kernel/mm/transparent_hugepage/enabled must be always or madvise, it is {pages!r}'


def _library(name):
  """The path of the allocator's library, or None."""
  files = _LIBRARIES.get(name, ())
  folders = [*os.environ.get('LD_LIBRARY_PATH', '').split(':'), os.path.join(sys.prefix, 'lib')]
  folders += [folder for pattern in _FOLDERS for folder in sorted(glob.glob(pattern))]
  for path in [os.path.join(folder, file) for file in files for folder in folders if folder] + _cached(files):
    if _machine(path) == _machine('/proc/self/exe'):
      return path
  return None


def _cached(files):
  """Paths that the dynamic linker's cache knows for `files`, for distributions with folders of their own."""
  try:
    with open('/etc/ld.so.cache', 'rb') as cache:
      strings = cache.read().split(b'\0')
  except OSError:
    return []
  paths = [s.decode(errors='replace') for s in strings if s.startswith(b'/')]
  return [path for path in paths if os.path.basename(path) in files]


def _machine(path):
  """Word size and processor that an ELF file is for; None where it is none. The wrong ones cannot be preloaded."""
  try:
    with open(path, 'rb') as file:
      head = file.read(20)
  except OSError:
    return None
  return (head[4:5], head[18:20]) if head[:4] == b'\x7fELF' else None


def _accelerator():
  """Why jax will not compute on the CPU here, or ''; decided without importing jax, by the rules that jax goes by."""
  wanted = os.environ.get('JAX_PLATFORMS') or os.environ.get('JAX_PLATFORM_NAME') or ''
  if wanted:
    return '' if wanted.lower() == 'cpu' else f'JAX_PLATFORMS={wanted}'
  nodes = [node for pattern in _NODES for node in glob.glob(pattern)]
  plugins = _plugins() if nodes else []
  return f'an accelerator is there: {nodes[0]}, {plugins[0]}' if plugins else ''


def _plugins():
  """Names of what lets jax use an accelerator; a device without it is a CPU machine to jax."""
  import importlib.metadata  # only where there is a device: it reads a file for every distribution
  import importlib.util
  import pkgutil

  names = [point.name for point in importlib.metadata.entry_points(group='jax_plugins')]
  if space := importlib.util.find_spec('jax_plugins'):
    names += [module.name for module in pkgutil.iter_modules(space.submodule_search_locations)]
  return names + (['libtpu'] if importlib.util.find_spec('libtpu') else [])


def _is_allocator(path):
  return any(name in os.path.basename(path) for name in _KNOWN)


def _mapped():
  with open('/proc/self/maps') as maps:
    return {line.split(maxsplit=5)[5].strip() for line in maps if line.count('/')}


def _error(text):
  from maxtext_layers import config  # only now: it loads yaml, and a program that restarts would do that twice

  return config.Error(text)
