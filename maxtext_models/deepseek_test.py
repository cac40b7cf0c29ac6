"""DeepSeek and Kimi: numbers that do not come from the cards, and what their config.json may say."""

import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import plan
from maxtext_layers import rope
from maxtext_models import registry

V2, V3 = 'arXiv 2405.04434, abstract', 'github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md'
# name: parameters and active ones in billions, where it is said,
# layers, dense, heads, experts, groups, eps, rope base, stretch, beta_fast, mscale, context
PUBLISHED = {
  'deepseek2-16b': (15.7, 2.4, 'arXiv 2405.04434, appendix B', 27, 1, 16, 64, 1, 1e-6, 1e4, 40, 32, 0.707, 163840),
  'deepseek2-236b': (236, 21, V2, 60, 1, 128, 160, 8, 1e-6, 1e4, 40, 32, 0.707, 163840),
  'deepseek3-671b': (671, 36.7, V3, 61, 3, 128, 256, 8, 1e-6, 1e4, 40, 32, 1.0, 163840),
  'deepseek3.1-671b': (671, 37, 'huggingface.co/deepseek-ai/DeepSeek-V3.1', 61, 3, 128, 256, 8, 1e-6, 1e4, 40, 32, 1.0,
                       163840),
  'deepseek-r1-671b': (671, 37, 'huggingface.co/deepseek-ai/DeepSeek-R1', 61, 3, 128, 256, 8, 1e-6, 1e4, 40, 32, 1.0,
                       163840),
  # without the module that predicts further tokens: V3's 671.03 and 61 indexers of 13.96 million
  'deepseek3.2-671b': (671.9, 37.5, V3 + '; arXiv 2512.02556, section 2', 61, 3, 128, 256, 8, 1e-6, 1e4, 40, 32, 1.0,
                       163840),
  'kimi-k2-1t': (1000, 32, 'huggingface.co/moonshotai/Kimi-K2-Base', 61, 1, 64, 384, 1, 1e-6, 5e4, 32, 1, 1.0, 131072),
  'kimi-k2-0905-1t': (1000, 32, 'huggingface.co/moonshotai/Kimi-K2-Instruct-0905', 61, 1, 64, 384, 1, 1e-6, 5e4, 64, 1,
                      1.0, 262144),
  'kimi-k2-thinking-1t': (1000, 32, 'huggingface.co/moonshotai/Kimi-K2-Thinking', 61, 1, 64, 384, 1, 1e-5, 5e4, 64, 1,
                          1.0, 262144),
  'kimi-k2.5-1t': (1000, 32, 'huggingface.co/moonshotai/Kimi-K2.5', 61, 1, 64, 384, 1, 1e-5, 5e4, 64, 32, 1.0, 262144),
  'kimi-k2.6-1t': (1000, 32, 'huggingface.co/moonshotai/Kimi-K2.6', 61, 1, 64, 384, 1, 1e-5, 5e4, 64, 32, 1.0, 262144),
}  # fmt: skip


def unit(billions):
  """One in the last digit that was published; of "1T" that is 0.1T."""
  return 100 if billions == 1000 else 10 ** -len(str(billions).partition('.')[2])


@pytest.mark.parametrize('name', PUBLISHED)
def test_card_has_the_published_numbers(name):
  total, active, _, layers, dense, heads, experts, groups, eps, base, factor, fast, mscale, context = PUBLISHED[name]
  c = registry.card(name)
  c.check()
  assert c.parameters() / 1e9 == pytest.approx(total, abs=unit(total) / 2)
  # who counts does not count the look-up in the token table; some cut off digits, some round
  assert (c.active_parameters() - c.vocab * c.d_model) / 1e9 == pytest.approx(active, abs=unit(active))
  assert (c.layers, c.dense_layers, c.heads, c.experts, c.groups) == (layers, dense, heads, experts, groups)
  assert (c.eps, c.theta, c.context, c.name) == (eps, base, context, name)
  assert c.scaling == rope.Yarn(factor, 4096, fast, 1.0, mscale=mscale, mscale_all_dim=mscale)
  assert c.source.startswith('https://huggingface.co/')


def test_every_card_is_in_the_table():
  names = {name for name in registry.names() if name.startswith(('deepseek', 'kimi'))}
  assert names - {'deepseek4-284b'} == set(PUBLISHED)  # which has a test of its own


@pytest.mark.parametrize('name', PUBLISHED)
def test_config_json_and_card_are_inverses(name):
  c = registry.card(name)
  back = registry.card_from_hf(c.hf_config())
  assert dataclasses.replace(back, name=c.name, source=c.source) == c
  assert back.hf_config() == c.hf_config()


@pytest.mark.parametrize('name', PUBLISHED)
def test_scan_plan(name):
  """The first layers dense, all others routed: two blocks are traced, whatever the depth."""
  c = registry.card(name)
  segments = plan.plan(c.blocks())
  assert [(len(s.specs), s.count) for s in segments] == [(1, c.dense_layers), (1, c.layers - c.dense_layers)]


@pytest.mark.parametrize('name', PUBLISHED)
def test_what_no_tolerance_sees_reaches_the_layers(name):
  """eps of the blocks, that of the latents, which is another, the base, and the temperature squared in the scale."""
  mscale = PUBLISHED[name][12]
  spec = registry.card(name).blocks()[-1]
  mixer = getattr(spec.mixer, 'latent', spec.mixer)  # of what an indexer is around
  assert spec.norm.eps == PUBLISHED[name][8] and mixer.latent_norm.eps == 1e-6
  assert mixer.rope.theta == PUBLISHED[name][9] and mixer.rope.pairs == 'neighbours'
  ln = {40: 3.6888794541, 32: 3.4657359028, 64: 4.1588830834}[PUBLISHED[name][10]]
  assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * mscale * ln + 1) ** 2, rel=1e-9)


def test_v3_by_hand():
  """671,026,419,200: tables, 61 layers of latent attention, 3 dense ones, 58 of 257 experts with router and bias."""
  attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
  layer = attention + 2 * 7168
  expert = 3 * 7168 * 2048
  total = 2 * 129280 * 7168 + 7168 + 61 * layer + 3 * 3 * 7168 * 18432 + 58 * (257 * expert + 256 * 7168 + 256)
  assert registry.card('deepseek3-671b').parameters() == total == 671_026_419_200


def test_v32_by_hand():
  """V3 and, in each layer, an indexer: wq_b, wk, k_norm with a bias, weights_proj of the published files."""
  index = 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168
  c = registry.card('deepseek3.2-671b')
  assert c.parameters() == 671_026_419_200 + 61 * index
  spec = c.blocks()[30].mixer.index
  assert (spec.heads, spec.head_dim, spec.top_k, spec.loss, spec.stage) == (64, 128, 2048, 0.0, 'sparse')
  assert c.cache_bytes(1000) == 1000 * 61 * 2 * (512 + 64 + 128)  # a latent, a rotary key and an indexer's key


def test_kimi_by_the_published_files():
  """The shapes of the tensors of Kimi-K2.5's text model, as its files list them; experts by what their words hold."""
  attention = 576 * 7168 + 512 + 16384 * 512 + 7168 * 8192 + 1536 * 7168 + 1536 + 12288 * 1536
  expert = 7168 * 256 * 8 + 2 * 2048 * 896 * 8
  routed = 384 * expert + 384 + 384 * 7168 + 3 * 7168 * 2048
  total = 2 * 163840 * 7168 + 7168 + 61 * (attention + 2 * 7168) + 3 * 7168 * 18432 + 60 * routed
  assert registry.card('kimi-k2.5-1t').parameters() == total


def test_names_as_people_type_them():
  """Of the public system, of Hugging Face, and ours."""
  assert registry.card('deepseek-ai/DeepSeek-V2-Lite') == registry.card('deepseek2-16b')
  for name in ('deepseek3-671b-2dfsdp', 'deepseek3-671b-batchsplit', 'deepseek-ai/DeepSeek-V3-0324'):
    assert registry.card(name) == registry.card('deepseek3-671b')
  assert registry.card('moonshotai/Kimi-K2-Instruct') == registry.card('kimi-k2-1t')


SMALL = registry.card('deepseek2-16b').hf_config()
LARGE = registry.card('deepseek3-671b').hf_config()
SPARSE = registry.card('deepseek3.2-671b').hf_config()


@pytest.mark.parametrize(
  'source, said',
  [
    ({**SMALL, 'norm_topk_prob': True}, 'norm_topk_prob=True is not supported'),
    ({**SMALL, 'topk_method': 'noaux_tc'}, "topk_method='noaux_tc' is not supported"),
    ({**SMALL, 'scoring_func': 'sigmoid'}, "scoring_func='sigmoid' is not supported"),
    ({**SMALL, 'rope_interleave': False}, 'rope_interleave=False is not supported'),
    ({**LARGE, 'scoring_func': 'softmax'}, "scoring_func='softmax' is not supported"),
    ({**LARGE, 'topk_method': 'greedy'}, "topk_method='greedy' is not supported"),
    ({**LARGE, 'moe_layer_freq': 2}, 'moe_layer_freq=2 is not supported'),
    ({**LARGE, 'num_key_value_heads': 8}, 'kv_heads=8 differs from heads=128'),
    ({**LARGE, 'n_group': 7}, 'groups=7, top_groups=4 do not fit experts=256'),
    ({**LARGE, 'topk_group': 9}, 'groups=8, top_groups=9 do not fit'),
    ({**LARGE, 'num_experts_per_tok': 200}, 'top_k=200 is more than'),
    ({**LARGE, 'first_k_dense_replace': 62}, 'dense_layers=62'),
    ({**LARGE, 'qk_rope_head_dim': 63, 'qk_nope_head_dim': 129}, 'rope_dim=63 is odd'),
    ({**LARGE, 'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
    ({**SPARSE, 'index_topk': 0}, 'index_topk=0 is not positive'),
    ({**SPARSE, 'index_head_dim': 32}, 'index_dim=32 is less than rope_dim=64'),
    ({**SPARSE, 'q_lora_rank': None}, 'q_rank=None'),
    ({**SPARSE, 'layer_types': ['full_attention'] * 61}, "layer_types holds 'full_attention'"),
    ({**SPARSE, 'mlp_layer_types': ['sparse'] * 61}, 'is not 3 dense layers'),
    ({k: v for k, v in SPARSE.items() if k != 'index_n_heads'}, 'lacks index_n_heads'),
    ({k: v for k, v in LARGE.items() if k != 'kv_lora_rank'}, 'lacks kv_lora_rank'),
    ({k: v for k, v in LARGE.items() if k != 'routed_scaling_factor'}, 'lacks routed_scaling_factor'),
  ],
)
def test_what_is_not_supported_is_named(source, said):
  with pytest.raises(config.Error, match=said):
    registry.card_from_hf(source)


def test_fields_as_older_files_have_them():
  """V2 and V3 were published with rope_scaling.type and an integer rope_theta, Kimi K2 with a model_type of its own."""
  source = {k: v for k, v in LARGE.items() if k not in ('rope_parameters', 'rope_interleave')}
  scaling = dict(source['rope_scaling'], type='yarn', factor=40)
  del scaling['rope_type']
  published = {**source, 'rope_theta': 10000, 'rope_scaling': scaling}
  expected = registry.card_from_hf(LARGE)
  for kind in ('deepseek_v3', 'kimi_k2'):
    assert registry.card_from_hf({**published, 'model_type': kind}) == expected
