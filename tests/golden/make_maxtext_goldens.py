"""Makes the checkpoints in the folder maxtext with the public MaxText, and what it computes with them; not a test.

    DECOUPLE_GCLOUD=TRUE python tests/golden/make_maxtext_goldens.py OUTPUT_DIR [CASE ..]

Needs MaxText 0.2.5 (its package is called maxtext) with jax 0.11.1; CPU is enough. Writes for every case CASE.npz
(tokens int32 [B, T]; logits float32 [B, T, V], of its forward pass in float32), CASE.json (config.json of the same
model, as transformers writes it) and CASE.zip, which holds the same weights three times, saved by its own code:

    stacked/0/items     parameters only, scan_layers=true, as its conversion from Hugging Face saves them
    unstacked/0/items   parameters only, scan_layers=false
    run/checkpoints/1   a training run's state, scan_layers=true, to which its trainer loaded the first of these

and for the case llama also

    unstacked/run/checkpoints/1   the same, scan_layers=false
    decode/0/items                parameters only in bfloat16, as its generate_param_only_checkpoint saves them

Its logits with all three agree, or nothing is written. Every weight is drawn at random away from its initial value, on
a grid of a few dozen values, so that files compress well. Logits have a standard deviation of 1 to 4.
"""

import json
import os
import pathlib
import sys
import tempfile
import zipfile
import zlib

from flax import linen as nn
from flax import nnx
import jax
import maxtext
from maxtext.checkpoint_conversion.utils import utils as conversion
from maxtext.common import checkpointing
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.utils import generate_param_only_checkpoint
from maxtext.utils import maxtext_utils
from maxtext.utils import model_creation_utils
from maxtext.utils import train_utils
import numpy as np

ROWS, LENGTH = 2, 48
ALWAYS = dict(
  run_name='run', hardware='cpu', skip_jax_distributed_system=True, override_model_config=True, jax_cache_dir='',
  dataset_type='synthetic', per_device_batch_size=ROWS, max_target_length=LENGTH, dtype='float32',
  weight_dtype='float32', attention='dot_product', float32_logits=True, float32_qk_product=True,
  matmul_precision='highest', async_checkpointing=False, sparse_matmul=False, megablox=False, capacity_factor=-1.0,
  enable_dropout=False, base_num_query_heads=6, base_num_kv_heads=2, head_dim=8, vocab_size=96,
)  # fmt: skip
HF = dict(
  vocab_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
  tie_word_embeddings=False, hidden_act='silu', attention_bias=False,
)  # fmt: skip
GROUPS = dict(
  q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, num_experts_per_tok=3,
  routed_scaling_factor=2.5,
)  # fmt: skip

# case -> (settings of MaxText, fields of config.json)
CASES = {
  'llama': (
    dict(model_name='llama3.1-8b', base_emb_dim=36, base_mlp_dim=40, base_num_decoder_layers=3),
    dict(
      HF, model_type='llama', architectures=['LlamaForCausalLM'], hidden_size=36, intermediate_size=40,
      num_hidden_layers=3, rms_norm_eps=1e-5, rope_theta=500000.0,
      rope_scaling=dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=8192),
    ),
  ),
  'llama_halves': (  # Llama 2 and 3, whose positions turn as Hugging Face's do
    dict(model_name='llama2-7b', base_emb_dim=36, base_mlp_dim=40, base_num_decoder_layers=3),
    dict(
      HF, model_type='llama', architectures=['LlamaForCausalLM'], hidden_size=36, intermediate_size=40,
      num_hidden_layers=3, rms_norm_eps=1e-5, rope_theta=10000.0,
    ),
  ),
  'qwen3': (
    dict(model_name='qwen3-0.6b', base_emb_dim=36, base_mlp_dim=40, base_num_decoder_layers=3),
    dict(
      HF, model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_size=36, intermediate_size=40,
      num_hidden_layers=3, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True,
    ),
  ),
  'qwen3_moe': (
    dict(model_name='qwen3-30b-a3b', base_emb_dim=24, base_mlp_dim=20, base_moe_mlp_dim=20,
         base_num_decoder_layers=3, num_experts=5, num_experts_per_tok=2),
    dict(
      HF, model_type='qwen3_moe', architectures=['Qwen3MoeForCausalLM'], hidden_size=24, intermediate_size=20,
      moe_intermediate_size=20, num_hidden_layers=3, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
      rms_norm_eps=1e-6, rope_theta=10000000.0,
    ),
  ),
  'mixtral': (
    dict(model_name='mixtral-8x7b', base_emb_dim=24, base_mlp_dim=20, base_moe_mlp_dim=20,
         base_num_decoder_layers=3, num_experts=5, num_experts_per_tok=2),
    dict(
      HF, model_type='mixtral', architectures=['MixtralForCausalLM'], hidden_size=24, intermediate_size=20,
      num_hidden_layers=3, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1000000.0,
    ),
  ),
  'deepseek3': (
    dict(
      GROUPS, model_name='deepseek3-671b', base_emb_dim=24, base_mlp_dim=28, base_moe_mlp_dim=20,
      base_num_decoder_layers=5, first_num_dense_layers=2, num_experts=6, base_num_query_heads=3,
      base_num_kv_heads=3, n_routing_groups=3, topk_routing_group=2, max_position_embeddings=640,
      original_max_position_embeddings=16, vocab_size=80,
    ),
    dict(
      GROUPS, model_type='deepseek_v3', architectures=['DeepseekV3ForCausalLM'], hidden_size=24, intermediate_size=28,
      moe_intermediate_size=20, num_hidden_layers=5, first_k_dense_replace=2, n_routed_experts=6, n_shared_experts=1,
      num_attention_heads=3, num_key_value_heads=3, n_group=3, topk_group=2, norm_topk_prob=True, vocab_size=80,
      max_position_embeddings=640, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act='silu', scoring_func='sigmoid',
      topk_method='noaux_tc', tie_word_embeddings=False, attention_bias=False, moe_layer_freq=1,
      rope_scaling=dict(type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                        original_max_position_embeddings=16),
    ),
  ),
  'deepseek2': (  # queries without a latent
    dict(
      GROUPS | dict(q_lora_rank=0, routed_scaling_factor=1.0), model_name='deepseek2-16b', base_emb_dim=24,
      base_mlp_dim=28, base_moe_mlp_dim=20, base_num_decoder_layers=3, first_num_dense_layers=1, num_experts=6,
      base_num_query_heads=3, base_num_kv_heads=3, max_position_embeddings=640, original_max_position_embeddings=16,
      shared_experts=2, vocab_size=80,
    ),
    dict(
      GROUPS | dict(q_lora_rank=None, routed_scaling_factor=1.0), model_type='deepseek_v2',
      architectures=['DeepseekV2ForCausalLM'], hidden_size=24, intermediate_size=28, moe_intermediate_size=20,
      num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=6, n_shared_experts=2, num_attention_heads=3,
      num_key_value_heads=3, n_group=1, topk_group=1, norm_topk_prob=False, vocab_size=80, max_position_embeddings=640,
      rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act='silu', scoring_func='softmax', topk_method='greedy',
      tie_word_embeddings=False, attention_bias=False, moe_layer_freq=1,
      rope_scaling=dict(type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
                        original_max_position_embeddings=16),
    ),
  ),
  'gpt_oss': (
    dict(
      model_name='gpt-oss-20b', base_emb_dim=24, base_mlp_dim=20, base_moe_mlp_dim=20, base_num_decoder_layers=4,
      num_experts=5, num_experts_per_tok=2, sliding_window_size=8, max_position_embeddings=512,
      original_max_position_embeddings=16,
    ),
    dict(
      HF, model_type='gpt_oss', architectures=['GptOssForCausalLM'], hidden_size=24, intermediate_size=20,
      num_hidden_layers=4, num_local_experts=5, num_experts_per_tok=2, sliding_window=8, attention_bias=True,
      layer_types=['sliding_attention', 'full_attention'] * 2, swiglu_limit=7.0, rms_norm_eps=1e-5,
      rope_theta=150000.0,
      rope_scaling=dict(rope_type='yarn', factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                        original_max_position_embeddings=16),
    ),
  ),
  'gemma2': (  # a layer of theirs is two of ours; their table has more rows than the published one
    dict(model_name='gemma2-2b', base_emb_dim=16, base_mlp_dim=24, base_num_decoder_layers=3, sliding_window_size=8,
         vocab_size=112, base_num_query_heads=4),
    dict(
      HF | dict(num_attention_heads=4), model_type='gemma2', architectures=['Gemma2ForCausalLM'], hidden_size=16,
      intermediate_size=24, num_hidden_layers=6, query_pre_attn_scalar=8, sliding_window=8, attn_logit_softcapping=50.0,
      final_logit_softcapping=30.0, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True,
      hidden_act='gelu_pytorch_tanh', hidden_activation='gelu_pytorch_tanh',
      layer_types=['sliding_attention', 'full_attention'] * 3,
    ),
  ),
  'gemma3': (  # two blocks of six layers and a layer more; no training state, whose 13 stacks would be the largest file
    dict(model_name='gemma3-4b', base_emb_dim=16, base_mlp_dim=18, base_num_decoder_layers=13, sliding_window_size=8,
         vocab_size=64, base_num_query_heads=4),
    dict(
      HF | dict(vocab_size=64, num_attention_heads=4), model_type='gemma3_text',
      architectures=['Gemma3ForCausalLM'], hidden_size=16, intermediate_size=18, num_hidden_layers=13,
      query_pre_attn_scalar=8, sliding_window=8, rms_norm_eps=1e-6,
      tie_word_embeddings=True, hidden_activation='gelu_pytorch_tanh', rope_theta=1000000.0,
      rope_local_base_freq=10000.0, rope_scaling=dict(rope_type='linear', factor=8.0),
      attn_logit_softcapping=None, final_logit_softcapping=None,
      layer_types=[('full_attention' if i % 6 == 5 else 'sliding_attention') for i in range(13)],
    ),
  ),
}  # fmt: skip


def configure(case, folder, **more):
  """MaxText's configuration of a case."""
  base = os.path.join(os.path.dirname(maxtext.__file__), 'configs', 'base.yml')
  settings = ALWAYS | CASES[case][0] | dict(base_output_directory=str(folder)) | more
  text = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
  return pyconfig.initialize(['make', base] + [f'{name}={text(value)}' for name, value in settings.items()])


def grid(draw, step):
  return (np.round(draw / step) * step).astype(np.float32)


def draw(case, tied, path, shape, scanned):
  """One parameter of MaxText's; `scanned`: its second axis, or only one, is that of layers."""
  normal = np.random.default_rng(zlib.crc32(f'{case} {path}'.encode())).standard_normal(shape)
  inner = shape[:1] + shape[2:] if scanned else shape
  if path.endswith('scale'):
    return grid(1 + 0.3 * normal, 1 / 16)
  if path.endswith(('bias', 'sinks')):
    return grid(0.5 * normal, 1 / 16)
  if path.endswith('embedding'):
    scale = 1.0 if not tied else 2.0 if case.startswith('gemma') else 0.375
    return grid(scale * normal, scale / 8)  # which bfloat16 holds, in which it reads a tied table
  if path.endswith(('wi_0', 'wi_1', 'wo')):  # [experts, in, out]
    fan = inner[1]
  else:
    fan = np.prod(inner[:2]) if path.endswith('out/kernel') else inner[0]
  return grid((2.0 if 'logits' in path or 'query' in path or 'wq' in path else 1.0) * normal / fan**0.5, 1 / 16)


def tree(case, config, mesh):
  """(model, its parameters as zeros)."""
  model = models.transformer_as_linen(config, mesh, quant=None, model_mode='train')
  boxed = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
  shapes = maxtext_utils.get_abstract_param(model, config)
  return model, jax.tree.map(lambda leaf: np.zeros((leaf.value if boxed(leaf) else leaf).shape, np.float32), shapes,
                             is_leaf=boxed)  # fmt: skip


def words(path):
  return [str(getattr(entry, 'key', getattr(entry, 'idx', entry))) for entry in path]


def slice_of(case, stacked, path):
  """The array of an unstacked model, out of those of a stacked one; path: words."""
  config = CASES[case][0]
  found = next((i for i, word in enumerate(path) if word.rsplit('_', 1)[-1].isdigit() and 'layers' in word), None)
  if found is None:
    return stacked['/'.join(path)]
  kind, layer = path[found].rsplit('_', 1)
  layer, before, after = int(layer), path[:found], path[found + 1 :]
  if config['model_name'].startswith(('gemma3', 'gpt-oss')):
    period = 6 if config['model_name'].startswith('gemma3') else 2
    whole = config['base_num_decoder_layers'] // period * period
    if layer >= whole:
      return stacked['/'.join([*before, 'layers_remainder', f'layers_{layer - whole}', *after])]
    kind, layer = f'layers/layers_{layer % period}', layer // period
  array = stacked['/'.join([*before, kind, *after])]
  return array[layer] if path[0] != 'params' else array.take(layer, 1)


def make(case, output):
  """One case."""
  tied = CASES[case][1]['tie_word_embeddings']
  tokens = np.random.default_rng(zlib.crc32(case.encode())).integers(0, CASES[case][1]['vocab_size'], (ROWS, LENGTH))
  tokens = tokens.astype(np.int32)
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
  with tempfile.TemporaryDirectory() as folder:
    folder, logits, stacked = pathlib.Path(folder), {}, {}
    for name in ('stacked', 'unstacked'):
      config = configure(case, folder / name, scan_layers=name == 'stacked')
      mesh = maxtext_utils.get_mesh_from_config(config)
      model, zeros = tree(case, config, mesh)
      leaves, structure = jax.tree_util.tree_flatten_with_path(zeros)
      values = []
      for path, leaf in leaves:
        path = words(path)
        if name == 'unstacked':
          values.append(slice_of(case, stacked, path))
          assert values[-1].shape == leaf.shape, (path, values[-1].shape, leaf.shape)
        else:
          scanned = 'layers' in path or 'dense_layers' in path or 'moe_layers' in path
          stacked['/'.join(path)] = draw(case, tied, '/'.join(path), leaf.shape, scanned)
          values.append(stacked['/'.join(path)])
          print(case, '/'.join(path), leaf.shape)
      params = jax.tree_util.tree_unflatten(structure, values)
      with jax.set_mesh(mesh):
        logits[name] = np.asarray(model.apply(params, tokens, positions, enable_dropout=False))
      conversion.save_weights_to_checkpoint(
        str(folder / name), params, 1, config.checkpoint_storage_use_ocdbt, config.checkpoint_storage_use_zarr3, config
      )
    saved = ['stacked', 'unstacked/0']
    if case != 'gemma3':
      logits['run'], state = train_state(case, folder, 'stacked', tokens, positions)
      saved.append('run/checkpoints')
    if case == 'llama':
      logits['unstacked run'], _ = train_state(case, folder / 'unstacked', 'unstacked', tokens, positions)
      config = configure(case, folder / 'decode')
      manager = checkpointing.create_orbax_checkpoint_manager(str(folder / 'decode'), True, False, 1)
      generate_param_only_checkpoint._save_decode_checkpoint(config, state, manager)
      saved += ['unstacked/run/checkpoints', 'decode']
    reference = logits['stacked'][..., : CASES[case][1]['vocab_size']]
    apart = {name: float(np.abs(logits[name] - logits['stacked']).max()) for name in logits}
    print(case, 'std', reference.std(), 'apart', apart)
    assert max(apart.values()) < 5e-5, apart
    np.savez_compressed(output / f'{case}.npz', tokens=tokens, logits=reference)
    (output / f'{case}.json').write_text(json.dumps(CASES[case][1], indent=1) + '\n')
    with zipfile.ZipFile(output / f'{case}.zip', 'w', zipfile.ZIP_LZMA) as archive:
      for name in saved:
        for path in sorted((folder / name).rglob('*')):
          if path.is_file():
            archive.write(path, path.relative_to(folder))


def train_state(case, folder, form, tokens, positions):
  """Saves a training state, which its trainer's own code fills from the parameters saved before; (logits, state)."""
  source = folder / '0/items' if form == 'unstacked' else folder / 'stacked/0/items'
  config = configure(
    case, folder, scan_layers=form == 'stacked', enable_checkpointing=True, load_parameters_path=str(source),
    checkpoint_period=1,
  )  # fmt: skip
  mesh = maxtext_utils.get_mesh_from_config(config)
  create, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
  _, optimizer = train_utils.create_training_optimizer(config, model, mesh=mesh)

  def state():
    whole = create()
    return train_state_nnx.TrainStateNNX(whole, nnx.Optimizer(whole, optimizer, wrt=nnx.Param))

  manager = train_utils.create_checkpoint_manager(config, mesh, state)
  filled, *_ = maxtext_utils.setup_training_state(None, config, mesh, manager, state)
  checkpointing.maybe_save_checkpoint(manager, filled, config, None, step=1)
  checkpointing.wait_until_finished(manager)
  graph = nnx.graphdef(nnx.eval_shape(state))
  with jax.set_mesh(mesh):
    return np.asarray(nnx.merge(graph, filled).model(tokens, positions, enable_dropout=False)), filled


def main():
  output = pathlib.Path(sys.argv[1])
  output.mkdir(parents=True, exist_ok=True)
  for case in sys.argv[2:] or CASES:
    make(case, output)


if __name__ == '__main__':
  main()
