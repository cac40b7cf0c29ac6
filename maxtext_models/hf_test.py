"""Strictness of the Hugging Face engine; that it computes what transformers does is tests/parity_test.py's business."""

import json
import os
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import config
from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_models import rows
from maxtext_models import weight_files
from tests.golden import golden


@pytest.fixture(name='make')
def _make(tmp_path):
  """make(case, edit of the tensors, changes of config.json) -> directory."""

  def make(case, edit=lambda t: t, **fields):
    directory = golden.directory(case, tmp_path)
    tensors = edit(safetensors.numpy.load_file(f'{directory}/model.safetensors'))
    safetensors.numpy.save_file(tensors, f'{directory}/model.safetensors', metadata={'format': 'pt'})
    source = json.load(open(f'{directory}/config.json')) | fields
    json.dump({k: v for k, v in source.items() if v is not None}, open(f'{directory}/config.json', 'w'))
    return directory

  return make


def drop(*names):
  return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def refused(directory):
  with pytest.raises(config.Error) as error:
    hf.load(directory)
  text = str(error.value)
  assert '\n' not in text and directory in text
  return text


GATE = 'model.layers.1.mlp.gate_proj.weight'


def test_missing_tensor_is_named(make):
  assert f'lacks {GATE}' in refused(make('llama', drop(GATE)))


def test_left_over_tensor_is_named_with_its_file(make):
  """A8: a source tensor that no row reads."""
  text = refused(make('llama', lambda t: t | {'model.layers.0.self_attn.q_proj.bias': np.ones(64, np.float32)}))
  assert 'holds model.layers.0.self_attn.q_proj.bias' in text and 'model.safetensors' in text


def test_biases_that_config_json_does_not_speak_of_are_not_lost(make):
  """A8: attention_bias=false with bias tensors in the file; the first ten are named, the others counted."""
  text = refused(make('llama_bias', attention_bias=False, mlp_bias=False))
  assert 'model.layers.0.mlp.down_proj.bias' in text and text.count('proj.bias') == 10 and 'and 4 more' in text


def test_biases_that_config_json_promises_must_be_there(make):
  """A8: the reverse."""
  text = refused(make('llama_bias', drop('model.layers.1.self_attn.o_proj.bias')))
  assert 'lacks model.layers.1.self_attn.o_proj.bias' in text


def test_wrong_shape_names_tensor_file_and_both_shapes(make):
  text = refused(make('llama', lambda t: t | {GATE: np.ones((88, 61), np.float32)}))
  assert GATE in text and '[88, 61]' in text and '[88, 64]' in text and 'model.safetensors' in text


def test_vocabulary_of_another_size_is_a_shape_error(make):
  text = refused(make('llama', vocab_size=160))
  assert 'model.embed_tokens.weight' in text and '[151, 64]' in text and '[160, 64]' in text


def test_tied_without_head_reads_the_table(make):
  """A13: tie_word_embeddings=true, at the top or nested, and no lm_head.weight."""
  card, model = hf.load(make('llama_tied'))
  assert card.tied and model.head is None


def test_tied_flag_nested(make):
  """A13: the flag in text_config."""
  card, model = hf.load(make('llama_tied', tie_word_embeddings=None, text_config={'tie_word_embeddings': True}))
  assert card.tied and model.head is None


def test_untied_without_head_names_it(make):
  """A13, A14: no head and tie_word_embeddings=false is an error, never a tie."""
  text = refused(make('llama', drop('lm_head.weight')))
  assert 'lacks lm_head.weight' in text and 'tie_word_embeddings=false' in text


def test_tied_with_another_head_is_refused(make):
  """A14: tie_word_embeddings=true and an lm_head.weight that is not the table."""
  text = refused(make('llama', tie_word_embeddings=True))
  assert 'lm_head.weight differs from model.embed_tokens.weight' in text and 'tie_word_embeddings=true' in text


def test_tied_with_an_equal_head_keeps_the_set_of_tensors(make, tmp_path):
  """A1, A14: the published Qwen3-0.6B holds the table twice; so does its export."""
  directory = make('llama_tied', lambda t: t | {'lm_head.weight': t['model.embed_tokens.weight'].copy()})
  card, model = hf.load(directory)
  hf.save(tmp_path / 'out', card, model)
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (directory, tmp_path / 'out'))
  assert there.keys() == back.keys() and 'lm_head.weight' in back
  assert all(there[k].tobytes() == back[k].tobytes() for k in there)


def test_tables_that_follow_from_the_config_are_passed_over_and_named(make):
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  directory = make('llama', lambda t: t | {name: np.ones(8, np.float32)})
  hf.load(directory)
  assert name in hf.remarks(directory)[0]


def test_fields_that_nobody_reads_are_named(make):
  """What config.json says beside the mathematics, or of a later release; what is read, or null, is not among them."""
  directory = make('qwen3', initializer_range=0.02, gate_of_tomorrow=[1], eos_token_id=3)
  (line,) = hf.remarks(directory)
  named = line.removeprefix('  in config.json, but not read: ').split(', ')
  assert {'initializer_range', 'gate_of_tomorrow'} <= set(named)
  source = json.load(open(f'{directory}/config.json'))
  kept = {'model_type', 'architectures', 'head_dim', 'rope_parameters', 'use_sliding_window', 'eos_token_id', 'dtype'}
  assert kept <= source.keys() and not kept & set(named)
  assert set(named) <= source.keys()


@pytest.mark.parametrize('kind', [np.float16, ml_dtypes.bfloat16])
def test_weights_keep_the_dtype_of_the_files(make, tmp_path, kind):
  """A2: bit-equal in the source dtype, also one that numpy does not know; config.json says it."""
  directory = make('qwen3', lambda t: {k: v.astype(kind) for k, v in t.items()})
  card, model = hf.load(directory)
  assert card.dtype == np.dtype(kind).name and model.embed.w[...].dtype == kind and model.dtype == kind
  hf.save(tmp_path / 'out', card, model)
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (directory, tmp_path / 'out'))
  assert there.keys() == back.keys()
  assert all(there[k].dtype == back[k].dtype and there[k].tobytes() == back[k].tobytes() for k in there)
  assert json.load(open(tmp_path / 'out/config.json'))['dtype'] == np.dtype(kind).name


def test_mixed_dtypes_stay_mixed(make, tmp_path):
  norm = 'model.norm.weight'
  directory = make('qwen3', lambda t: {k: v if k == norm else v.astype(ml_dtypes.bfloat16) for k, v in t.items()})
  card, model = hf.load(directory)
  assert card.dtype is None
  hf.save(tmp_path / 'out', card, model)
  back = safetensors.numpy.load_file(tmp_path / 'out/model.safetensors')
  assert {k for k, v in back.items() if v.dtype == np.float32} == {norm}


def test_weights_widened_for_training_go_back_to_the_published_dtype(make, tmp_path):
  """A1: bfloat16 files, float32 in training, bfloat16 files."""
  directory = make('qwen3', lambda t: {k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()})
  card, model = hf.load(directory, dtype='float32')
  assert model.embed.w[...].dtype == np.float32
  hf.save(tmp_path / 'out', card, model)
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (directory, tmp_path / 'out'))
  assert all(there[k].tobytes() == back[k].tobytes() for k in there)


def test_unknown_dtype_is_refused(make):
  text = refused(make('llama', lambda t: t | {GATE: t[GATE].astype(np.int8)}))
  assert GATE in text and 'I8' in text


def test_many_files_with_an_index(make, tmp_path):
  """Written in shards, read back in shards; the index names every tensor."""
  directory = make('qwen3')
  card, model = hf.load(directory)
  hf.save(tmp_path / 'out', card, model, shard_bytes=100_000)
  shards = sorted(n for n in os.listdir(tmp_path / 'out') if n.endswith('.safetensors'))
  assert len(shards) > 2 and shards[0] == f'model-00001-of-{len(shards):05}.safetensors'
  index = json.load(open(tmp_path / 'out/model.safetensors.index.json'))
  there = safetensors.numpy.load_file(f'{directory}/model.safetensors')
  assert index['weight_map'].keys() == there.keys()
  assert index['metadata']['total_size'] == sum(v.nbytes for v in there.values())
  for name, shard in index['weight_map'].items():
    assert safetensors.numpy.load_file(tmp_path / 'out' / shard)[name].tobytes() == there[name].tobytes()
  again, _ = hf.load(str(tmp_path / 'out'))
  assert again == card
  os.remove(tmp_path / 'out' / shards[1])
  assert shards[1] in refused(str(tmp_path / 'out'))


@pytest.mark.parametrize(
  'spoil, said',
  [
    (
      lambda d: open(f'{d}/model.safetensors', 'wb').write(b'not safetensors at all'),
      'not a readable safetensors file',
    ),
    (lambda d: os.truncate(f'{d}/model.safetensors', 200_000), 'not a readable safetensors file'),
    (lambda d: os.truncate(f'{d}/model.safetensors', 0), 'not a readable safetensors file'),
    (lambda d: os.rename(f'{d}/model.safetensors', f'{d}/pytorch_model.bin'), 'pytorch_model.bin, a pickle'),
    (lambda d: os.rename(f'{d}/model.safetensors', f'{d}/a.safetensors'), 'neither model.safetensors nor an index'),
    (lambda d: os.remove(f'{d}/model.safetensors'), 'holds no safetensors'),
    (lambda d: open(f'{d}/config.json', 'w').write('{'), 'is not JSON'),
    (lambda d: open(f'{d}/config.json', 'w').write('[]'), 'no JSON object'),
    (lambda d: os.remove(f'{d}/config.json'), 'cannot read'),
    (lambda d: open(f'{d}/model.safetensors.index.json', 'w').write('{}'), 'not an index'),
    (lambda d: write_index(d, ['model.safetensors']), 'not an index'),
    (lambda d: write_index(d, {GATE: '../model.safetensors'}), f"{GATE} is in '../model.safetensors', which is not"),
    (lambda d: write_index(d, {GATE: '/etc/passwd'}), "'/etc/passwd', which is not the name of a file beside it"),
    (lambda d: write_index(d, {GATE: '..'}), "'..', which is not"),
    (lambda d: write_index(d, {GATE: 3}), 'is in 3, which is not'),
    (
      lambda d: write_index(d, {GATE: 'model-00001-of-00001.safetensors'}),
      'holds both model.safetensors and model.safetensors.index.json',
    ),
    (
      lambda d: write_index(d, {GATE: 'model.safetensors', 'model.x.weight': 'model.safetensors'}),
      'model.safetensors has no tensor model.x.weight, though the index says so',
    ),
    (
      lambda d: (os.remove(f'{d}/model.safetensors'), os.mkdir(f'{d}/model.safetensors')),
      'model.safetensors is a folder, not a safetensors file',
    ),
  ],
)
def test_damage_is_one_line_with_the_file(make, spoil, said):
  directory = make('llama')
  spoil(directory)
  assert said in refused(directory)


def write_index(directory, weight_map):
  with open(f'{directory}/model.safetensors.index.json', 'w') as file:
    json.dump({'weight_map': weight_map}, file)


def test_an_index_may_name_the_one_file(make):
  directory = make('llama')
  write_index(
    directory, dict.fromkeys(safetensors.numpy.load_file(f'{directory}/model.safetensors'), 'model.safetensors')
  )
  assert hf.load(directory)[0].layers == 2


def test_padded_tables_are_cut_on_export(make, tmp_path):
  """A1, A18: rows above the vocabulary are zero on load and never leave."""
  directory, native = make('llama'), str(tmp_path / 'native')
  card, model = hf.load(directory, vocab_multiple=256)
  assert model.embed.w[...].shape == (256, 64) and not np.asarray(model.embed.w[...])[151:].any()
  checkpoint.save(native, card, model)
  card, model = checkpoint.load(native)
  hf.save(tmp_path / 'out', card, model)
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (directory, tmp_path / 'out'))
  assert all(there[k].tobytes() == back[k].tobytes() for k in there)
  assert json.load(open(tmp_path / 'out/config.json'))['vocab_size'] == 151


def test_companions_are_carried_byte_by_byte(make, tmp_path):
  directory = make('llama')
  texts = {'tokenizer.json': '{"a": 1}', 'generation_config.json': '{"eos_token_id": [3, 5], "bos_token_id": 1}',
           'chat_template.jinja': '{{ x }}\n'}  # fmt: skip
  for name, text in texts.items():
    open(f'{directory}/{name}', 'w').write(text)
  card, model = hf.load(directory)
  hf.save(tmp_path / 'out', card, model, carry_from=directory)
  for name, text in texts.items():
    assert open(tmp_path / 'out' / name).read() == text
  assert json.load(open(tmp_path / 'out/config.json'))['eos_token_id'] == [3, 5]


def test_special_ids_of_config_json_alone_are_kept(make, tmp_path):
  """They stop generation: without a generation config they must not be lost on either way."""
  directory = make('llama')
  source = json.load(open(f'{directory}/config.json')) | {'eos_token_id': [2, 7], 'bos_token_id': 1}
  json.dump(source, open(f'{directory}/config.json', 'w'))
  card, model = hf.load(directory)
  hf.save(tmp_path / 'out', card, model, carry_from=directory)
  wanted = {'bos_token_id': 1, 'eos_token_id': [2, 7]}
  assert json.load(open(tmp_path / 'out/generation_config.json')) == wanted
  found = json.load(open(tmp_path / 'out/config.json'))
  assert {k: found[k] for k in wanted} == wanted


@pytest.mark.parametrize('case', ['llama_bias', 'mixtral', 'qwen3_moe', 'gpt_oss'])
def test_names_cover_every_tensor(make, case):
  directory = make(case)
  card, files = hf.read(directory)
  assert set(hf.names(card).values()) == set(files.headers)


def test_names_of_experts(make):
  """A name for each expert that has a tensor of its own; the tensor of both for parameters that share one."""
  assert hf.names(hf.read(make('llama_bias'))[0])['layers.1.mixer.q.b'] == 'model.layers.1.self_attn.q_proj.bias'
  names = hf.names(hf.read(make('qwen3_moe'))[0])
  assert names['layers.2.ffn.experts.up.5'] == 'model.layers.2.mlp.experts.5.up_proj.weight'
  assert names['layers.1.ffn.up'] == 'model.layers.1.mlp.up_proj.weight'
  names = hf.names(hf.read(make('gpt_oss'))[0])
  assert names['layers.0.ffn.experts.gate'] == names['layers.0.ffn.experts.up'] == f'{EXPERTS}gate_up_proj'


EXPERTS = 'model.layers.0.mlp.experts.'


def test_experts_that_lack_or_do_not_fit_are_named(make):
  name = 'model.layers.0.mlp.experts.3.up_proj.weight'
  assert f'lacks {name}' in refused(make('qwen3_moe', drop(name)))
  name = 'model.layers.0.mlp.experts.6.up_proj.weight'
  left = refused(make('qwen3_moe_plain', lambda t: t | {name.replace('.0.', '.1.'): np.ones((20, 40), np.float32)}))
  assert f'holds {name.replace(".0.", ".1.")}' in left
  text = refused(make('gpt_oss', lambda t: t | {f'{EXPERTS}gate_up_proj': np.ones((5, 40, 46), np.float32)}))
  assert f'{EXPERTS}gate_up_proj has shape [5, 40, 46], config.json makes it [5, 40, 48]' in text


@pytest.mark.parametrize('case', ['mixtral', 'gpt_oss'])
def test_experts_over_many_files(make, tmp_path, case):
  """Written in files of 64 kB with an index, and read from them: not a bit changes."""
  directory = make(case)
  card, model = hf.load(directory)
  hf.save(tmp_path / 'out', card, model, shard_bytes=64_000)
  assert len([name for name in os.listdir(tmp_path / 'out') if name.endswith('.safetensors')]) > 2
  hf.save(tmp_path / 'back', *hf.load(tmp_path / 'out'))
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (directory, tmp_path / 'back'))
  assert there.keys() == back.keys() and all(there[k].tobytes() == back[k].tobytes() for k in there)


SHARED = [
  # equal parts that alternate, or follow each other: our first axis counts them
  (('(f two) d -> two d f',), [(4, 3), (4, 3)], lambda a, b: np.stack([a.T, b.T], 1).reshape(6, 4)),
  (('e (two f) d -> two e d f',), [(2, 4, 3)] * 2, lambda a, b: np.concatenate([a, b], 2).transpose(0, 2, 1)),
  # unequal parts side by side: over the whole axis, and within each of its groups
  (
    ('(+ g h) d -> d g h', '(+ g r w) d -> d g r w'),
    [(4, 2, 3), (4, 2, 5, 2)],
    lambda a, b: np.concatenate([a.reshape(4, -1), b.reshape(4, -1)], 1).T,
  ),
  (
    ('(g + h) () d -> d g h', '(g + r w) () d -> d g r w'),
    [(4, 2, 3), (4, 2, 5, 2)],
    lambda a, b: np.concatenate([a, b.reshape(4, 2, -1)], 2).reshape(4, 1, -1).T,
  ),
]


@pytest.mark.parametrize('patterns, shapes, together', SHARED)
def test_parameters_that_share_a_tensor(patterns, shapes, together):
  """Taken out of it and put back, against NumPy."""
  rng = np.random.default_rng(0)
  values = [rng.standard_normal(shape) for shape in shapes]
  tensor = together(*values)
  sources = [rows.Source('x', patterns, ('a', 'b'), i, tuple(shapes), None) for i in (0, 1)]
  for value, source in zip(values, sources, strict=True):
    assert source.their_shape() == tensor.shape
    np.testing.assert_array_equal(source.take(tensor), value)
  np.testing.assert_array_equal(sources[0].join(values), tensor)


def test_tensors_are_in_memory_one_at_a_time(make, monkeypatch, tmp_path):
  """Loading: when one is read, the one before is gone. Saving: what waits to be written is less than a file and one."""
  directory, alive = make('mixtral'), []
  get, tensors, limit = weight_files.Files.get, hf.tensors, 32_000

  def watched(self, tensor):
    assert not [one for one in alive if one() is not None]
    array = get(self, tensor)
    alive.append(weakref.ref(array))
    return array

  monkeypatch.setattr(weight_files.Files, 'get', watched)
  card, model = hf.load(directory)
  assert len(alive) > 40
  made, largest = [], 97 * 40 * 4  # bytes of a table

  def counted(*args):
    for theirs, array in tensors(*args):
      assert sum(one.nbytes for ref in made if (one := ref()) is not None) <= limit + largest
      made.append(weakref.ref(array))
      yield theirs, array
      del array

  monkeypatch.setattr(hf, 'tensors', counted)
  hf.save(tmp_path / 'out', card, model, shard_bytes=limit)
  assert len(made) == len(alive)
