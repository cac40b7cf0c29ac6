"""Numbers that do not come from the cards: parameter counts, shapes, eps and rope bases as published."""

import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import rope
from maxtext_models import registry

# name: parameters (of the published safetensors, a tied table once; model cards), layers, d_model, d_ff, heads,
# kv_heads, head_dim, vocab, tied, eps, rope base, context
LLAMA3, QWEN3, SMOL = (1e-5, 500000.0), (1e-6, 1000000.0), 1e-5
PUBLISHED = {
  'llama2-7b': (6738415616, 32, 4096, 11008, 32, 32, 128, 32000, False, 1e-5, 10000.0, 4096),
  'llama2-13b': (13015864320, 40, 5120, 13824, 40, 40, 128, 32000, False, 1e-5, 10000.0, 4096),
  'llama2-70b': (68976648192, 80, 8192, 28672, 64, 8, 128, 32000, False, 1e-5, 10000.0, 4096),
  'llama3-8b': (8030261248, 32, 4096, 14336, 32, 8, 128, 128256, False, *LLAMA3, 8192),
  'llama3-70b': (70553706496, 80, 8192, 28672, 64, 8, 128, 128256, False, *LLAMA3, 8192),
  'llama3.1-8b': (8030261248, 32, 4096, 14336, 32, 8, 128, 128256, False, *LLAMA3, 131072),
  'llama3.1-70b': (70553706496, 80, 8192, 28672, 64, 8, 128, 128256, False, *LLAMA3, 131072),
  'llama3.1-405b': (405853388800, 126, 16384, 53248, 128, 8, 128, 128256, False, *LLAMA3, 131072),
  'llama3.2-1b': (1235814400, 16, 2048, 8192, 32, 8, 64, 128256, True, *LLAMA3, 131072),
  'llama3.2-3b': (3212749824, 28, 3072, 8192, 24, 8, 128, 128256, True, *LLAMA3, 131072),
  'llama3.3-70b': (70553706496, 80, 8192, 28672, 64, 8, 128, 128256, False, *LLAMA3, 131072),
  'smollm2-135m': (134515008, 30, 576, 1536, 9, 3, 64, 49152, True, SMOL, 100000.0, 8192),
  'smollm2-360m': (361821120, 32, 960, 2560, 15, 5, 64, 49152, True, SMOL, 100000.0, 8192),
  'smollm2-1.7b': (1711376384, 24, 2048, 8192, 32, 32, 64, 49152, True, SMOL, 130000.0, 8192),
  'qwen3-0.6b': (596049920, 28, 1024, 3072, 16, 8, 128, 151936, True, *QWEN3, 40960),
  'qwen3-1.7b': (1720574976, 28, 2048, 6144, 16, 8, 128, 151936, True, *QWEN3, 40960),
  'qwen3-4b': (4022468096, 36, 2560, 9728, 32, 8, 128, 151936, True, *QWEN3, 40960),
  'qwen3-8b': (8190735360, 36, 4096, 12288, 32, 8, 128, 151936, False, *QWEN3, 40960),
  'qwen3-14b': (14768307200, 40, 5120, 17408, 40, 8, 128, 151936, False, *QWEN3, 40960),
  'qwen3-32b': (32762123264, 64, 5120, 25600, 64, 8, 128, 151936, False, *QWEN3, 40960),
  'qwen3-0.6b-base': (596049920, 28, 1024, 3072, 16, 8, 128, 151936, True, *QWEN3, 32768),
  'qwen3-1.7b-base': (1720574976, 28, 2048, 6144, 16, 8, 128, 151936, True, *QWEN3, 32768),
  'qwen3-4b-base': (4022468096, 36, 2560, 9728, 32, 8, 128, 151936, True, *QWEN3, 32768),
  'qwen3-8b-base': (8190735360, 36, 4096, 12288, 32, 8, 128, 151936, False, *QWEN3, 32768),
  'qwen3-14b-base': (14768307200, 40, 5120, 17408, 40, 8, 128, 151936, False, *QWEN3, 32768),
  'qwen3-4b-thinking-2507': (4022468096, 36, 2560, 9728, 32, 8, 128, 151936, True, 1e-6, 5000000.0, 262144),
  'qwen3-4b-instruct-2507': (4022468096, 36, 2560, 9728, 32, 8, 128, 151936, True, 1e-6, 5000000.0, 262144),
}
STRETCH = {
  'llama3.1-8b': 8,
  'llama3.1-70b': 8,
  'llama3.1-405b': 8,
  'llama3.2-1b': 32,
  'llama3.2-3b': 32,
  'llama3.3-70b': 8,
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_card_has_the_published_numbers(name):
  c = registry.card(name)
  c.check()
  got = (
    c.parameters(), c.layers, c.d_model, c.d_ff, c.heads, c.kv_heads, c.head_dim, c.vocab, c.tied, c.eps, c.theta,
    c.context,
  )  # fmt: skip
  assert got == PUBLISHED[name]
  factor = STRETCH.get(name)
  assert c.scaling == (rope.Llama3(factor=factor, low=1.0, high=4.0, trained=8192) if factor else None)
  assert c.source.startswith('https://huggingface.co/')
  assert c.name == name


def test_every_card_is_in_the_table():
  assert set(registry.names()) == set(PUBLISHED)


@pytest.mark.parametrize('name', PUBLISHED)
def test_eps_and_rope_base_reach_the_layers(name):
  """No tolerance on logits sees them: an eps or a base that is a little wrong must be seen here."""
  eps, theta = PUBLISHED[name][9:11]
  spec = registry.card(name).blocks()[-1]
  assert spec.norm.eps == eps
  assert spec.mixer.rope.theta == theta
  assert spec.mixer.rope.head_dim == PUBLISHED[name][6]
  if name.startswith('qwen3'):
    assert spec.mixer.qk_norm.eps == eps
  else:
    assert spec.mixer.qk_norm is None


@pytest.mark.parametrize('name', PUBLISHED)
def test_config_json_and_card_are_inverses(name):
  c = registry.card(name)
  back = registry.card_from_hf(c.hf_config())
  assert dataclasses.replace(back, name=c.name, source=c.source) == c
  assert back.hf_config() == c.hf_config()


def test_parameters_that_multiply():
  """Qwen3-0.6B by hand: q and o 16 heads, k and v 8 heads of 128, three matrices of 1024 x 3072, and the tied head."""
  layer = 1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072
  assert registry.card('qwen3-0.6b').matmul_parameters() == 28 * layer + 151936 * 1024


def test_names_as_people_type_them():
  assert registry.card('Qwen/Qwen3-0.6B') == registry.card('qwen3-0.6b')
  assert registry.card('meta-llama/Llama-3.1-8B') == registry.card('llama3.1-8b')
  assert registry.card('SmolLM2-135M-Instruct') == registry.card('smollm2-135m')


def test_a_card_is_the_callers_own():
  registry.card('llama3.1-8b').layers = 1
  assert registry.card('llama3.1-8b').layers == 32


def test_an_unknown_name_gets_the_nearest():
  with pytest.raises(config.Error, match=r"unknown model 'qwen3-0.6'; did you mean 'qwen3-0.6b'"):
    registry.card('qwen3-0.6')
