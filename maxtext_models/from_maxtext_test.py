import doctest
import functools
import json
import shutil
import weakref

from flax import nnx
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_layers import config
from maxtext_models import checkpoint
from maxtext_models import convert
from maxtext_models import from_maxtext
from maxtext_models import hf
from maxtext_models import layout
from maxtext_models import maxtext_names
from maxtext_models import registry
from maxtext_models import scoring
from tests import programs
from tests.golden import golden

run = programs.fixture(convert.main)
CASES = golden.MAXTEXT


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> the directory with its three checkpoints, made once."""
  return functools.cache(lambda case: golden.maxtext_directory(case, tmp_path_factory.mktemp(case)))


@pytest.fixture(name='card')
def _card(folder):
  return lambda case: registry.card_from_hf(json.load(open(f'{folder(case)}/config.json')))


@pytest.fixture(name='loaded', scope='module')
def _loaded(folder):
  """case -> the model of its stacked checkpoint, loaded once."""

  @functools.cache
  def loaded(case):
    card = registry.card_from_hf(json.load(open(f'{folder(case)}/config.json')))
    return from_maxtext.load(f'{folder(case)}/stacked/0/items', card, scan=True)

  return loaded


def parameters(model):
  """name -> array of every parameter by layer, whatever the plan."""
  leaves, segments = layout.leaves(nnx.state(model, nnx.Param)), model.stack.plan
  slots = layout.slots(leaves, segments)
  value = lambda slot: np.asarray(leaves[slot.path].get_value())
  return {name: value(s) if s.repeat is None else value(s)[s.repeat] for name, s in slots.items()}


@pytest.mark.parametrize('case', CASES)
def test_the_converted_model_computes_what_maxtext_does(loaded, case):
  """Logits of MaxText's own forward pass, at all positions."""
  tokens, logits = golden.maxtext_logits(case)
  assert logits.std() >= 1
  assert np.abs(scoring.scorer(loaded(case)[1])(tokens) - logits).max() <= 1e-4


@pytest.mark.parametrize(
  'case, form',
  [
    *((case, 'unstacked/0') for case in CASES),
    *((case, 'run') for case in CASES if case != 'gemma3'),
    ('llama', 'unstacked/run'),
    ('llama', 'decode'),
  ],
)
def test_every_form_holds_the_same(folder, card, loaded, case, form):
  """scan_layers=false, the newest step of a run with its optimizer, and what is saved for decoding (bfloat16)."""
  _, model = from_maxtext.load(f'{folder(case)}/{form}', card(case), scan=form == 'run')
  wanted, got = parameters(loaded(case)[1]), parameters(model)
  assert wanted.keys() == got.keys()
  assert all(np.array_equal(wanted[name].astype(got[name].dtype), got[name]) for name in wanted)
  assert {str(array.dtype) for array in got.values()} == {'bfloat16' if form == 'decode' else 'float32'}


@pytest.mark.parametrize('case', CASES)
def test_every_change_is_needed(folder, loaded, card, case, monkeypatch):
  """Without one of them (a scale, w + 1) logits are far off."""
  tokens, logits = golden.maxtext_logits(case)
  family = maxtext_names.FAMILIES[type(card(case))]
  changes = family.changes(card(case))
  for left_out in changes:
    kept = {ours: change for ours, change in changes.items() if ours != left_out}
    monkeypatch.setitem(maxtext_names.FAMILIES, type(card(case)), family._replace(changes=lambda _, kept=kept: kept))
    _, wrong = from_maxtext.load(f'{folder(case)}/stacked', card(case), scan=True)
    assert np.abs(scoring.scorer(wrong)(tokens) - logits).max() > 1e-2, left_out


@pytest.mark.parametrize('case, wrong', [('llama', 'halves'), ('llama_halves', 'neighbours')])
def test_the_other_order_of_rotary_pairs_is_far_off(folder, card, case, wrong):
  tokens, logits = golden.maxtext_logits(case)
  _, model = from_maxtext.load(f'{folder(case)}/stacked', card(case), scan=True, pairs=wrong)
  assert np.abs(scoring.scorer(model)(tokens) - logits).max() > 1e-2


def test_one_array_at_a_time(folder, card, monkeypatch):
  """Each is read once, and is forgotten before the next is read."""
  read, get = [], from_maxtext.Files.get

  def watched(self, name):
    assert not any(last() is not None for last in read)
    array = get(self, name)
    read.append(weakref.ref(array))
    names.append(name)
    return array

  names: list[str] = []
  monkeypatch.setattr(from_maxtext.Files, 'get', watched)
  for form in ('stacked', 'unstacked/0'):
    names.clear()
    from_maxtext.load(f'{folder("llama")}/{form}', card('llama'), scan=True)
    assert sorted(names) == sorted(from_maxtext.Files(f'{folder("llama")}/{form}').headers)


def test_there_and_on_to_hugging_face(run, folder, tmp_path):
  """The program: native and HF directories, tokenizer files from beside the config.json."""
  source, native, there = folder('llama'), tmp_path / 'native', tmp_path / 'hf'
  shutil.copytree(f'{source}/run', tmp_path / 'run')
  (tmp_path / 'with').mkdir()
  shutil.copyfile(f'{source}/config.json', tmp_path / 'with/config.json')
  (tmp_path / 'with/tokenizer.json').write_text('{"version": "1.0"}')
  flags = [f'--source={tmp_path / "run"}', f'--card={tmp_path / "with"}']
  code, out, err = run(*flags, f'--target={native}', '--to=native', '--source_format=maxtext')
  assert code == 0, err
  assert 'passed over, because only weights are read: nnx_aux, opt_state, step' in out
  assert run(*flags, f'--target={there}', '--to=hf')[0] == 0
  assert (native / 'tokenizer.json').read_bytes() == (there / 'tokenizer.json').read_bytes() == b'{"version": "1.0"}'
  scores = [scoring.scorer(checkpoint.load(d)[1])(golden.maxtext_logits('llama')[0]) for d in (native, there)]
  assert np.array_equal(*scores) and hf.read(there)[0].scaling.factor == 8.0


def test_the_order_of_rotary_pairs_can_be_said(run, folder, card, loaded, tmp_path):
  """MaxText's llama3.3-70b stretches nothing and turns halves, whatever its card says."""
  flags = [f'--source={folder("llama")}/stacked', f'--card={folder("llama")}', '--to=native']
  assert 'taken to turn neighbours' in run(*flags, f'--target={tmp_path / "auto"}')[1]
  assert 'taken to turn' not in run(*flags, f'--target={tmp_path / "said"}', '--rope_pairs=neighbours')[1]
  run(*flags, f'--target={tmp_path / "halves"}', '--rope_pairs=halves')
  auto, said, halves = (parameters(checkpoint.load(tmp_path / one)[1]) for one in ('auto', 'said', 'halves'))
  assert all(np.array_equal(auto[name], said[name]) for name in auto)
  files = from_maxtext.Files(f'{folder("llama")}/stacked')
  assert np.array_equal(halves['layers.1.mixer.k'], files.get('decoder/layers/self_attention/key/kernel')[:, 1])
  assert {name.split('.', 2)[-1] for name in auto if not np.array_equal(auto[name], halves[name])} == {
    'mixer.q',
    'mixer.k',
  }
  _, plain = from_maxtext.load(f'{folder("llama_halves")}/stacked', card('llama_halves'), pairs='halves')
  assert np.array_equal(
    parameters(plain)['layers.0.mixer.q'], parameters(loaded('llama_halves')[1])['layers.0.mixer.q']
  )
  with pytest.raises(config.Error, match='--rope_pairs=halves is for a Llama; this is a Mixtral'):
    from_maxtext.load(f'{folder("mixtral")}/stacked', card('mixtral'), pairs='halves')


def test_inspect(run, folder):
  code, out, _ = run(f'--source={folder("llama")}/run', '--inspect')
  told = dict(line.split(maxsplit=1) for line in out.splitlines())
  assert code == 0
  assert told['kind'] == 'maxtext' and told['layout'].startswith('stacked') and told['items'].endswith('1/items')
  assert told['others'] == 'nnx_aux, opt_state, step' and told['tied'] == 'False'
  assert told['parameters'] == '33,948' and told['dtype'] == 'float32'
  assert 'unstacked' in run(f'--source={folder("llama")}/unstacked', '--inspect')[1]


def test_other_programs_say_how_to_convert_it(folder):
  with pytest.raises(config.Error, match=r'a checkpoint of the public MaxText.*--card=NAME'):
    checkpoint.load(f'{folder("llama")}/stacked/0')


@pytest.mark.parametrize(
  'flags, said',
  [
    ([], 'flag --card is needed'),
    (['--card=lama3.1-8b'], "did you mean 'llama3.1-8b'"),
    (['--card=nowhere.json'], 'cannot read nowhere.json'),
    (['--card=llama4-scout'], 'a Llama4 is not read from a checkpoint of MaxText'),
    (['--card=llama3.1-8b'], 'token_embedder/embedding has shape [96, 36], the card makes it [128256, 4096]'),
    (['--card=qwen3-8b'], 'lacks decoder/layers/self_attention/key_norm/scale'),
    (['--card=llama3.2-1b'], 'holds decoder/logits_dense/kernel, which a Llama of 16 layers does not have'),
    (['--card=llama3.1-8b', '--source_format=hf'], '--source_format=hf, but'),
  ],
)
def test_bad_cards_are_one_line_and_code_2(run, folder, tmp_path, flags, said):
  code, _, err = run(f'--source={folder("llama")}/stacked', f'--target={tmp_path / "t"}', '--to=hf', *flags)
  assert code == 2 and said in err
  assert not (tmp_path / 't').exists()


@pytest.fixture(name='anew', scope='module')
def _anew(folder, tmp_path_factory):
  """Saves the arrays of a case anew with Orbax, after `edit` changed them (name -> array); its directory."""

  def anew(edit, case='llama', **options):
    files = from_maxtext.Files(f'{folder(case)}/stacked')
    arrays = {name: files.get(name) for name in files.headers}
    edit(arrays)
    tree: dict = {}
    for name, array in arrays.items():
      *words, last = name.split('/')
      functools.reduce(lambda inner, word: inner.setdefault(word, {}), words, tree)[last] = array
    target = tmp_path_factory.mktemp('anew')
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
      writer.save(target / '7/items', args=ocp.args.PyTreeSave({'params': {'params': tree}}))
    return str(target)

  return anew


Q, EMBED, HEAD = 'decoder/layers/self_attention/query/kernel', 'token_embedder/embedding', 'decoder/logits_dense/kernel'


@pytest.mark.parametrize(
  'options', [dict(use_ocdbt=True), dict(use_ocdbt=False), dict(use_ocdbt=False, use_zarr3=True)]
)
def test_formats_of_files_and_dtypes(anew, card, loaded, options):
  """bfloat16 stays bfloat16; the array of a norm that is float32 stays float32; whatever the files look like."""
  narrow = lambda arrays: arrays.update({k: v.astype(ml_dtypes.bfloat16) for k, v in arrays.items() if 'norm' not in k})
  _, model = from_maxtext.load(anew(narrow, **options), card('llama'))
  got, wanted = parameters(model), parameters(loaded('llama')[1])
  assert {str(v.dtype) for k, v in got.items() if 'norm' not in k} == {'bfloat16'}
  assert all(np.array_equal(got[name], wanted[name].astype(got[name].dtype)) for name in got)


def test_biases_of_routers_among_the_parameters(anew, card, loaded):
  """Where releases before kept them, stacked along the second axis like everything else."""
  name = 'decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias'
  _, model = from_maxtext.load(
    anew(lambda arrays: arrays.update({name: arrays[name].T}), 'deepseek3'), card('deepseek3')
  )
  wanted, got = parameters(loaded('deepseek3')[1]), parameters(model)
  assert all(np.array_equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize('case, every', [('gemma2', 3), ('gemma3', 2)])
def test_other_turns_of_windows_are_refused(folder, card, case, every):
  """Shapes would not show it."""
  other = card(case)
  other.full_every = every
  with pytest.raises(config.Error, match=f'full_every={every}, where the Gemma[23] of MaxText has'):
    from_maxtext.load(f'{folder(case)}/stacked', other)


def test_doctests():
  assert doctest.testmod(from_maxtext).failed == 0


@pytest.mark.parametrize('rows', [112, 90])
def test_tables_of_another_number_of_rows(anew, run, folder, card, loaded, tmp_path, rows):
  """Padded as MaxText pads, or shorter by a few; said in a line."""

  def resize(arrays):
    for name, axis in ((EMBED, 0), (HEAD, 1)):
      zeros = [(0, 0), (0, 0)]
      zeros[axis] = (0, max(0, rows - 96))
      arrays[name] = np.pad(arrays[name].take(range(min(rows, 96)), axis), zeros, constant_values=9.0)

  source = anew(resize)
  code, out, _ = run(f'--source={source}', f'--card={folder("llama")}', f'--target={tmp_path / "t"}', '--to=native')
  assert code == 0 and f'tables have {rows} rows for the 96 tokens of the card' in out
  got, wanted = parameters(checkpoint.load(tmp_path / 't')[1]), parameters(loaded('llama')[1])
  for name in ('embed', 'head'):
    assert got[name].shape == wanted[name].shape
    assert np.array_equal(got[name][: min(rows, 96)], wanted[name][: min(rows, 96)]) and not got[name][rows:].any()


@pytest.mark.parametrize(
  'edit, said',
  [
    (
      lambda arrays: arrays.update({Q: arrays[Q].astype(np.int8)}),
      f'{Q} has dtype int8; quantised checkpoints are not',
    ),
    (lambda arrays: arrays.update({Q.replace('kernel', 'lora_a'): arrays[Q]}), 'holds adapters (decoder/layers/'),
    (lambda arrays: arrays.pop(Q), f'lacks {Q}, which a Llama of 3 layers has'),
    (
      lambda arrays: arrays.update({'decoder/layers/mlp/more': arrays[Q]}),
      'holds decoder/layers/mlp/more, which a Llama',
    ),
    (
      lambda arrays: arrays.update({Q: arrays[Q][:, :2]}),
      f'{Q} has shape [36, 2, 6, 8], the card makes it [36, 3, 6, 8]',
    ),
    (
      lambda arrays: arrays.update({EMBED: arrays[EMBED].repeat(8, 0)}),
      f'{EMBED} has shape [768, 36], the card makes it',
    ),
  ],
)
def test_what_does_not_fit_is_named(anew, run, folder, tmp_path, edit, said):
  source = anew(edit)
  code, _, err = run(f'--source={source}', f'--card={folder("llama")}', f'--target={tmp_path / "t"}', '--to=hf')
  assert code == 2 and said in err
  assert not (tmp_path / 't').exists()
