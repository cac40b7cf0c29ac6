"""Numbers that do not come from the cards: parameter counts, shapes, eps and rope bases as published."""

import collections
import dataclasses

import pytest

from maxtext_layers import delta
from maxtext_layers import norm
from maxtext_layers import plan
from maxtext_layers import rope
from maxtext_models import card
from maxtext_models import registry

# name: parameters (of the published safetensors, a tied table once; model cards), layers, d_model, d_ff, heads,
# kv_heads, head_dim, vocab, tied, eps, rope base, context
LLAMA3, QWEN3, SMOL = (1e-5, 500000.0), (1e-6, 1000000.0), 1e-5
GEMMA, GEMMA3 = (True, 1e-6, 10000.0), (True, 1e-6, 1000000.0)
# of the image-text models: the tower; the projection into the text part, a matrix and a norm, is 1152 * (d_model + 1)
TOWER = 416866032
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
  'qwen3-vl-2b': (1720574976, 28, 2048, 6144, 16, 8, 128, 151936, True, 1e-6, 5000000.0, 262144),
  'qwen3-vl-4b': (4022468096, 36, 2560, 9728, 32, 8, 128, 151936, True, 1e-6, 5000000.0, 262144),
  'qwen2.5-0.5b': (494032768, 24, 896, 4864, 14, 2, 64, 151936, True, *QWEN3, 32768),
  'qwen2.5-1.5b': (1543714304, 28, 1536, 8960, 12, 2, 128, 151936, True, *QWEN3, 131072),
  'qwen2.5-3b': (3085938688, 36, 2048, 11008, 16, 2, 128, 151936, True, *QWEN3, 32768),
  'qwen2.5-7b': (7615616512, 28, 3584, 18944, 28, 4, 128, 152064, False, *QWEN3, 131072),
  'qwen2.5-14b': (14770033664, 48, 5120, 13824, 40, 8, 128, 152064, False, 1e-5, 1000000.0, 131072),
  'qwen2.5-32b': (32763876352, 64, 5120, 27648, 40, 8, 128, 152064, False, 1e-5, 1000000.0, 131072),
  'qwen2.5-72b': (72706203648, 80, 8192, 29568, 64, 8, 128, 152064, False, 1e-5, 1000000.0, 131072),
  'qwen2.5-0.5b-instruct': (494032768, 24, 896, 4864, 14, 2, 64, 151936, True, *QWEN3, 32768),
  'qwen2.5-1.5b-instruct': (1543714304, 28, 1536, 8960, 12, 2, 128, 151936, True, *QWEN3, 32768),
  'qwen2.5-3b-instruct': (3085938688, 36, 2048, 11008, 16, 2, 128, 151936, True, *QWEN3, 32768),
  'qwen2.5-7b-instruct': (7615616512, 28, 3584, 18944, 28, 4, 128, 152064, False, *QWEN3, 32768),
  'qwen2.5-14b-instruct': (14770033664, 48, 5120, 13824, 40, 8, 128, 152064, False, *QWEN3, 32768),
  'qwen2.5-32b-instruct': (32763876352, 64, 5120, 27648, 40, 8, 128, 152064, False, *QWEN3, 32768),
  'qwen2.5-72b-instruct': (72706203648, 80, 8192, 29568, 64, 8, 128, 152064, False, *QWEN3, 32768),
  'mistral-7b-v0.1': (7241732096, 32, 4096, 14336, 32, 8, 128, 32000, False, 1e-5, 10000.0, 32768),
  'mistral-7b-v0.2': (7241732096, 32, 4096, 14336, 32, 8, 128, 32000, False, 1e-5, 1000000.0, 32768),
  'mistral-7b-v0.3': (7248023552, 32, 4096, 14336, 32, 8, 128, 32768, False, 1e-5, 1000000.0, 32768),
  'gemma-2b': (2506172416, 18, 2048, 16384, 8, 1, 256, 256000, *GEMMA, 8192),
  'gemma-7b': (8537680896, 28, 3072, 24576, 16, 16, 256, 256000, *GEMMA, 8192),
  'gemma2-2b': (2614341888, 26, 2304, 9216, 8, 4, 256, 256000, *GEMMA, 8192),
  'gemma2-9b': (9241705984, 42, 3584, 14336, 16, 8, 256, 256000, *GEMMA, 8192),
  'gemma2-27b': (27227128320, 46, 4608, 36864, 32, 16, 128, 256000, *GEMMA, 8192),
  'gemma3-270m': (268098176, 18, 640, 2048, 4, 1, 256, 262144, *GEMMA3, 32768),
  'gemma3-1b': (999885952, 26, 1152, 6912, 4, 1, 256, 262144, *GEMMA3, 32768),
  'gemma3-4b': (4300079472 - TOWER - 1152 * 2561, 34, 2560, 10240, 8, 4, 256, 262208, *GEMMA3, 131072),
  'gemma3-12b': (12187325040 - TOWER - 1152 * 3841, 48, 3840, 15360, 16, 8, 256, 262208, *GEMMA3, 131072),
  'gemma3-27b': (27432406640 - TOWER - 1152 * 5377, 62, 5376, 21504, 32, 16, 128, 262208, *GEMMA3, 131072),
  'olmo3-7b': (7298011136, 32, 4096, 11008, 32, 32, 128, 100278, False, 1e-6, 500000.0, 65536),
  'olmo3-7b-pt': (7298011136, 32, 4096, 11008, 32, 32, 128, 100278, False, 1e-6, 500000.0, 8192),
  'olmo3-32b': (32233522176, 64, 5120, 27648, 40, 8, 128, 100278, False, 1e-6, 500000.0, 65536),
}
# name: parameters and active ones, in billions to three digits, as published (source in the comment), then numbers of
# config.json: layers, d_model, d_expert, heads, kv_heads, head_dim, vocab, experts, top_k, eps, rope base, context
MIXTRAL, QWEN3_30B, QWEN3_235B = (1e-5, 1000000.0), (48, 2048, 768, 32, 4), (94, 4096, 1536, 64, 4)
MIXTURES = {
  # 46.7 and 12.9: mistral.ai/news/mixtral-of-experts; 141 and 39: mistral.ai/news/mixtral-8x22b
  'mixtral-8x7b': (46.7, 12.9, 32, 4096, 14336, 32, 8, 128, 32000, 8, 2, *MIXTRAL, 32768),
  'mixtral-8x22b': (141, 39, 56, 6144, 16384, 48, 8, 128, 32768, 8, 2, *MIXTRAL, 65536),
  'mixtral-8x22b-base': (141, 39, 56, 6144, 16384, 48, 8, 128, 32000, 8, 2, *MIXTRAL, 65536),
  # the model cards at huggingface.co/Qwen: "30.5B in total and 3.3B activated", "235B and 22B", "480B and 35B"
  'qwen3-30b-a3b': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, *QWEN3, 40960),
  'qwen3-30b-a3b-base': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, *QWEN3, 32768),
  'qwen3-30b-a3b-thinking-2507': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, 1e-6, 1e7, 262144),
  'qwen3-30b-a3b-instruct-2507': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, 1e-6, 1e7, 262144),
  'qwen3-coder-30b-a3b': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, 1e-6, 1e7, 262144),
  'qwen3-vl-30b-a3b': (30.5, 3.3, *QWEN3_30B, 128, 151936, 128, 8, 1e-6, 5e6, 262144),
  'qwen3-omni-30b-a3b': (30.5, 3.3, *QWEN3_30B, 128, 152064, 128, 8, *QWEN3, 65536),
  'qwen3-235b-a22b': (235, 22, *QWEN3_235B, 128, 151936, 128, 8, *QWEN3, 40960),
  'qwen3-235b-a22b-thinking-2507': (235, 22, *QWEN3_235B, 128, 151936, 128, 8, 1e-6, 5e6, 262144),
  'qwen3-235b-a22b-instruct-2507': (235, 22, *QWEN3_235B, 128, 151936, 128, 8, 1e-6, 5e6, 262144),
  'qwen3-coder-480b-a35b': (480, 35, 62, 6144, 2560, 96, 8, 128, 151936, 160, 8, 1e-6, 1e7, 262144),
  # arXiv 2508.10925, table 1: 20.91 and 116.83; 3.61 and 5.13 active without the embedding, which is 0.58
  'gpt-oss-20b': (20.9, 3.61 + 0.58, 24, 2880, 2880, 64, 8, 64, 201088, 32, 4, 1e-5, 150000.0, 131072),
  'gpt-oss-120b': (116.83, 5.13 + 0.58, 36, 2880, 2880, 64, 8, 64, 201088, 128, 4, 1e-5, 150000.0, 131072),
}
# name: parameters of the text part, exactly: the numbers in the published safetensors without those of `mtp` and the
# tower, as llama.cpp counts them in GGUF files (n_params); then numbers of config.json: layers, d_model, d_ff or
# d_expert, heads, kv_heads, key and value heads of a delta net, vocab, experts, top_k, tied
HYBRIDS = {
  'qwen3-next-80b-a3b': (79674391296, 48, 2048, 512, 16, 2, 16, 32, 151936, 512, 10, False),
  'qwen3.5-0.8b': (752393024, 24, 1024, 3584, 8, 2, 16, 16, 248320, None, None, True),
  'qwen3.5-2b': (1881825088, 24, 2048, 6144, 8, 2, 16, 16, 248320, None, None, True),
  'qwen3.5-4b': (4205751296, 32, 2560, 9216, 16, 4, 16, 32, 248320, None, None, True),
  'qwen3.5-9b': (8953803264, 32, 4096, 12288, 16, 4, 16, 32, 248320, None, None, False),
  'qwen3.5-27b': (26895998464, 64, 5120, 17408, 24, 4, 16, 48, 248320, None, None, False),
  'qwen3.5-35b-a3b': (34660610688, 40, 2048, 512, 16, 2, 16, 32, 248320, 256, 8, False),
  'qwen3.5-122b-a10b': (122111526912, 48, 3072, 1024, 32, 2, 16, 64, 248320, 256, 8, False),
  'qwen3.5-397b-a17b': (396346350336, 60, 4096, 1024, 32, 2, 16, 64, 248320, 512, 10, False),
}
ELSEWHERE = [name for name in registry.names() if name.startswith(('deepseek', 'kimi'))]  # deepseek_test.py has a table
UNPUBLISHED = ('envy-switch-base', 'envy-switch-large', 'envy-switch-xxl')  # tests/envy_twin_test.py counts them
# name: what the paper (arXiv 2005.14165, table 2.1) or the name says, layers, d_model, heads, vocab, positions
GPT3 = {
  'gpt3-125m': ('125M', 12, 768, 12, 50257, 2048),
  'gpt3-350m': ('356M', 24, 1024, 16, 50257, 2048),  # printed as 350M; GPT-2 Medium's card has 355M for 1024 positions
  'gpt3-760m': ('760M', 24, 1536, 16, 50257, 2048),
  'gpt3-1.3b': ('1.3B', 24, 2048, 16, 50257, 2048),
  'gpt3-2.7b': ('2.7B', 32, 2560, 32, 50257, 2048),
  'gpt3-6.7b': ('6.7B', 32, 4096, 32, 50257, 2048),
  'gpt3-13b': ('13B', 40, 5120, 40, 50257, 2048),
  'gpt3-175b': ('175B', 96, 12288, 96, 50257, 2048),
  'gpt3-52k': ('52K', 1, 16, 2, 1024, 2048),
  'gpt3-6b': ('6B', 48, 3072, 12, 32768, 16384),
  'gpt3-22b': ('22B', 48, 6144, 24, 32768, 16384),
}
LLAMA8, LLAMA32 = (rope.Llama3(factor=factor, low=1.0, high=4.0, trained=8192) for factor in (8.0, 32.0))
YARN = rope.Yarn(factor=8.0, trained=8192, attention=1.2079441541679836)
STRETCH = {
  'llama3.1-8b': LLAMA8, 'llama3.1-70b': LLAMA8, 'llama3.1-405b': LLAMA8, 'llama3.2-1b': LLAMA32,
  'llama3.2-3b': LLAMA32, 'llama3.3-70b': LLAMA8, 'gemma3-4b': rope.Linear(8.0), 'gemma3-12b': rope.Linear(8.0),
  'gemma3-27b': rope.Linear(8.0), 'olmo3-7b': YARN, 'olmo3-32b': YARN,
}  # fmt: skip
# name: total parameters, experts, every how manyth layer has them, norm of queries, context. Totals are 109 and
# 402 on the Hugging Face pages, less 0.87 of the vision tower, which is not read; 17 are active by the model card.
SCOUT, MAVERICK = (109 - 0.87, 16, 1, True), (402 - 0.87, 128, 2, False)
LLAMA4 = {
  'llama4-17b-16e': (*SCOUT, 262144),
  'llama4-17b-16e-instruct': (*SCOUT, 10485760),
  'llama4-17b-128e': (*MAVERICK, 262144),
  'llama4-17b-128e-instruct': (*MAVERICK, 1048576),
}


@pytest.mark.parametrize('name', LLAMA4)
def test_llama4_has_the_published_numbers(name):
  c, (total, experts, every, normed, context) = registry.card(name), LLAMA4[name]
  c.check()
  assert c.parameters() / 1e9 == pytest.approx(total, rel=4e-3)
  assert c.active_parameters() / 1e9 == pytest.approx(17, abs=0.5)
  assert (c.layers, c.d_model, c.d_ff, c.d_expert, c.heads, c.kv_heads, c.head_dim, c.vocab, c.tied) == (
    48, 5120, 16384, 8192, 40, 8, 128, 202048, False,
  )  # fmt: skip
  assert (c.experts, c.routed_every, c.qk_norm, c.context, c.eps) == (experts, every, normed, context, 1e-5)
  local, whole = c.blocks()[2].mixer, c.blocks()[3].mixer
  assert (local.chunk, local.rope.theta, local.rope.pairs, local.temperature) == (8192, 500000.0, 'neighbours', None)
  assert local.rope.scaling == (rope.Llama3(16.0, 1.0, 1.0, 8192) if normed else None)
  assert (whole.chunk, whole.rope, whole.temperature.floor, whole.temperature.scale) == (None, None, 8192, 0.1)
  assert whole.turned_norm is None and (local.turned_norm.eps == 1e-5 if normed else local.turned_norm is None)
  assert c.blocks()[3].ffn.weigh == 'input' and c.name == name


# name: total parameters with towers, those of the towers, active ones or None, layers, d_model, d_ff, heads, kv_heads,
# full kv_heads, window, context; from the model card at huggingface.co/google/gemma-4-31B-it: 5.1 and 8.0 "with

# embeddings", towers of 0.15 and 0.30; 30.7; 25.2 and 3.8
GEMMA4 = {
  'gemma4-e2b': (5.1, 0.45, None, 35, 1536, 6144, 8, 1, 1, 512, 131072),
  'gemma4-e4b': (8.0, 0.45, None, 42, 2560, 10240, 8, 2, 2, 512, 131072),
  'gemma4-26b': (25.2, 0, 3.8, 30, 2816, 2112, 16, 8, 2, 1024, 262144),
  'gemma4-31b': (30.7, 0, 30.7, 60, 5376, 21504, 32, 16, 4, 1024, 262144),
}


def unread(c):
  """Published keys and values of layers that read others': two maps to each layer's heads, and a norm of keys."""
  mixers = [spec.mixer for spec in c.blocks() if spec.mixer.reuse]
  return sum(2 * c.d_model * m.kv_heads * m.head_dim + m.head_dim for m in mixers)


@pytest.mark.parametrize('name', GEMMA4)
def test_gemma4_has_the_published_numbers(name):
  c, (total, towers, active, *numbers) = registry.card(name), GEMMA4[name]
  c.check()
  assert numbers == [
    c.layers, c.d_model, c.d_ff, c.heads, c.kv_heads, c.full_kv_heads, c.window, c.context,
  ]  # fmt: skip
  assert (c.parameters() + unread(c)) / 1e9 + towers == pytest.approx(total, abs=0.05)
  if active is not None:
    assert c.active_parameters() / 1e9 == pytest.approx(active, abs=0.05)
  assert (c.vocab, c.head_dim, c.full_head_dim, c.eps, c.tied) == (262144, 256, 512, 1e-6, True)
  local, full = c.blocks()[0], c.blocks()[-1]
  assert (local.mixer.rope.theta, local.mixer.rope.scaling) == (10000.0, None)
  assert (full.mixer.rope.theta, full.mixer.rope.scaling) == (1e6, rope.Proportional(0.25))
  assert local.mixer.qk_norm.eps == full.mixer.value_norm.eps == 1e-6 and c.final_cap() == 30.0
  assert c.name == name


@pytest.mark.parametrize('name, effective', [('gemma4-e2b', 2.3), ('gemma4-e4b', 4.5)])
def test_effective_parameters_of_gemma4(name, effective):
  """The model card's figure (2.3 of 5.1 "with embeddings", 4.5 of 8.0) is everything in the files but both tables.

  That is, with the towers (0.45) and the keys and values that nothing reads.
  """
  c = registry.card(name)
  tables = c.vocab * c.d_model + c.layer_vocab * c.layers * c.layer_input
  assert (c.parameters() + unread(c) - tables) / 1e9 + 0.45 == pytest.approx(effective, abs=0.05)


@pytest.mark.parametrize('name', PUBLISHED)
def test_card_has_the_published_numbers(name):
  c = registry.card(name)
  c.check()
  got = (
    c.parameters(), c.layers, c.d_model, c.d_ff, c.heads, c.kv_heads, c.head_dim, c.vocab, c.tied, c.eps, c.theta,
    c.context,
  )  # fmt: skip
  assert got == PUBLISHED[name]
  assert c.scaling == STRETCH.get(name)
  assert c.source.startswith('https://huggingface.co/') or name == 'olmo3-7b-pt'
  assert c.name == name


@pytest.mark.parametrize('name', MIXTURES)
def test_card_with_experts_has_the_published_numbers(name):
  """Sizes as far as they are published: three digits, or all there are."""
  c, (total, active, *numbers) = registry.card(name), MIXTURES[name]
  c.check()
  spec = c.blocks()[-1]
  assert numbers == [
    c.layers, c.d_model, c.d_expert, c.heads, c.kv_heads, c.head_dim, c.vocab, c.experts, c.top_k, c.eps, c.theta,
    c.context,
  ]  # fmt: skip
  assert c.parameters() / 1e9 == pytest.approx(total, rel=2e-3 if total < 100 else 4e-3)
  assert c.active_parameters() / 1e9 == pytest.approx(active, abs=0.06 if active < 20 else 0.5)
  assert (spec.ffn.router.experts, spec.ffn.router.top_k, spec.ffn.d_expert) == (c.experts, c.top_k, c.d_expert)
  assert not c.tied and c.source.startswith('https://huggingface.co/') and c.name == name


def test_what_only_gpt_oss_has():
  """Its config.json and arXiv 2508.10925, section 2."""
  c = registry.card('gpt-oss-20b')
  assert [spec.mixer.window for spec in c.blocks()[:4]] == [128, None, 128, None]
  assert c.scaling == rope.Yarn(factor=32.0, trained=4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
  spec = c.blocks()[0]
  assert (spec.ffn.activation.limit, spec.ffn.activation.alpha, spec.ffn.activation.offset) == (7.0, 1.702, 1.0)
  assert spec.mixer.sinks and spec.mixer.bias == ('q', 'k', 'v', 'o') and spec.ffn.bias == ('gate', 'up', 'down')


@pytest.mark.parametrize('name', HYBRIDS)
def test_card_of_delta_nets_has_the_published_numbers(name):
  c, (total, *numbers) = registry.card(name), HYBRIDS[name]
  c.check()
  assert c.parameters() == total
  experts = (c.experts, c.top_k) if isinstance(c, card.Mixture) else (None, None)
  width = c.d_expert if isinstance(c, card.Mixture) else c.d_ff
  assert numbers == [
    c.layers, c.d_model, width, c.heads, c.kv_heads, c.key_heads, c.value_heads, c.vocab, *experts, c.tied,
  ]  # fmt: skip
  assert (c.head_dim, c.key_dim, c.value_dim, c.taps, c.rotary, c.theta, c.eps, c.context) == (
    256, 128, 128, 4, 0.25, 1e7, 1e-6, 262144,
  )  # fmt: skip
  assert c.source.startswith('https://huggingface.co/Qwen/') and c.name == name


@pytest.mark.parametrize('name, active', [('qwen3.5-35b-a3b', 3), ('qwen3.5-122b-a10b', 10), ('qwen3.5-397b-a17b', 17)])
def test_so_many_parameters_are_active_as_the_name_says(name, active):
  assert registry.card(name).active_parameters() / 1e9 == pytest.approx(active, abs=0.5)


def test_what_a_token_of_qwen3_next_meets():
  """3,563,766,528, one row of the embedding among them: counted from the tensors of the published index."""
  c = registry.card('qwen3-next-80b-a3b')
  assert c.active_parameters() - (c.vocab - 1) * c.d_model == 3563766528


@pytest.mark.parametrize('name', HYBRIDS)
def test_three_delta_nets_and_an_attention_are_one_scanned_period(name):
  """Eps, rope base and share of a head that turns reach the layers; every norm but that in the delta net is 1 + w."""
  c = registry.card(name)
  (segment,) = plan.plan(c.blocks())
  *nets, last = segment.specs
  assert len(nets) == 3 and segment.count == c.layers // 4 and len(set(nets)) == 1
  assert (last.mixer.rope.theta, last.mixer.rope.rotary, last.mixer.gate) == (1e7, 64, True)
  assert last.norm == nets[0].norm == last.mixer.qk_norm == c.final_norm() == norm.Spec(1e-6, offset=1.0)
  assert nets[0].mixer == delta.Spec(16, HYBRIDS[name][7], 128, 128, norm.Spec(1e-6), taps=4)


@pytest.mark.parametrize('name', GPT3)
def test_gpt3_has_the_published_numbers(name):
  """The total is 12 L D^2 of maps, 13 L D of biases and norms, the tables of ids and positions, and the last norm."""
  c = registry.card(name)
  c.check()
  printed, layers, d, heads, vocab, positions = GPT3[name]
  assert (c.layers, c.d_model, c.heads, c.vocab, c.context, c.eps) == (layers, d, heads, vocab, positions, 1e-5)
  assert (c.d_ff, c.head_dim, c.kv_heads, c.tied) == (4 * d, d // heads, heads, True)
  assert c.parameters() == 12 * layers * d * d + 13 * layers * d + (vocab + positions) * d + 2 * d
  number, unit = float(printed[:-1]), {'K': 1e3, 'M': 1e6, 'B': 1e9}[printed[-1]]
  assert c.parameters() == pytest.approx(number * unit, rel=0.03 if number > 6 else 0.07)


def test_every_card_is_in_a_table():
  assert set(registry.names()) == {*PUBLISHED, *GPT3, *MIXTURES, *HYBRIDS, *UNPUBLISHED, *LLAMA4, *GEMMA4, *ELSEWHERE}


@pytest.mark.parametrize('name', PUBLISHED)
def test_eps_and_rope_base_reach_the_layers(name):
  """No tolerance on logits sees them: an eps or a base that is a little wrong must be seen here."""
  eps, theta = PUBLISHED[name][9:11]
  found = registry.card(name)
  for spec in set(found.blocks()):
    around = [spec.norm] if isinstance(spec.norm, norm.Spec) else [spec.norm.before, spec.norm.after]
    assert {n.eps for n in around if n is not None} == {eps}
    sliding = name.startswith('gemma3') and spec.mixer.window
    assert spec.mixer.rope.theta == (10000.0 if sliding else theta)
    assert spec.mixer.rope.head_dim == PUBLISHED[name][6]
    if name.startswith(('qwen3', 'gemma3', 'olmo3')):
      assert spec.mixer.qk_norm.eps == eps
    else:
      assert spec.mixer.qk_norm is None
  assert found.final_norm().eps == eps


@pytest.mark.parametrize('name', MIXTURES)
def test_eps_and_rope_base_reach_the_layers_beside_experts(name):
  for spec in registry.card(name).blocks()[:2]:
    assert (spec.norm.eps, spec.mixer.rope.theta) == MIXTURES[name][11:13]
    assert spec.mixer.qk_norm is None if not name.startswith('qwen3') else spec.mixer.qk_norm.eps == 1e-6
    assert (spec.ffn.router.score, spec.ffn.router.normalize) == ('softmax', True)


@pytest.mark.parametrize('name', [*PUBLISHED, *GPT3, *MIXTURES, *HYBRIDS, *UNPUBLISHED, *LLAMA4, *GEMMA4])
def test_config_json_and_card_are_inverses(name):
  c = registry.card(name)
  back = registry.card_from_hf(c.hf_config())
  assert dataclasses.replace(back, name=c.name, source=c.source) == c
  assert back.hf_config() == c.hf_config()


def test_parameters_that_multiply():
  """Qwen3-0.6B by hand: q and o 16 heads, k and v 8 heads of 128, three matrices of 1024 x 3072, and the tied head."""
  layer = 1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072
  assert registry.card('qwen3-0.6b').matmul_parameters() == 28 * layer + 151936 * 1024


def test_what_a_token_meets():
  """Qwen3-30B-A3B by hand: attention and router, 8 of 128 experts of 3 x 2048 x 768; norms and both tables apart."""
  c = registry.card('qwen3-30b-a3b')
  matrices = 48 * (2048 * 128 * (32 + 4 + 4 + 32) + 2048 * 128 + 8 * 3 * 2048 * 768)
  assert c.matmul_parameters() == matrices + 151936 * 2048
  assert c.active_parameters() == matrices + 2 * 151936 * 2048 + 48 * (2 * 2048 + 2 * 128) + 2048
  assert c.forward_flops(100) == 2 * 100 * c.matmul_parameters() + 48 * 2 * 100 * 100 * 32 * 128


# name: {window of a layer: how many}, [(what its period is by windows, repeats)] of the scan plan
LOCAL, FULL = 1024, None
WINDOWS = {
  'qwen2.5-72b': ({None: 80}, [((None,), 80)]),
  'mistral-7b-v0.1': ({4096: 32}, [((4096,), 32)]),
  'mistral-7b-v0.3': ({None: 32}, [((None,), 32)]),
  'gemma-7b': ({None: 28}, [((None,), 28)]),
  'gemma2-2b': ({4096: 13, None: 13}, [((4096, None), 13)]),
  'gemma2-27b': ({4096: 23, None: 23}, [((4096, None), 23)]),
  'gemma3-270m': ({512: 15, None: 3}, [((512,) * 5 + (None,), 3)]),
  'gemma3-4b': ({LOCAL: 29, FULL: 5}, [((LOCAL,) * 5 + (FULL,), 5), ((LOCAL,), 4)]),
  'gemma3-27b': ({LOCAL: 52, FULL: 10}, [((LOCAL,) * 5 + (FULL,), 10), ((LOCAL,), 2)]),
  'olmo3-32b': ({4096: 48, None: 16}, [((4096,) * 3 + (None,), 16)]),
}


@pytest.mark.parametrize('name', WINDOWS)
def test_windows_and_their_scan_plan(name):
  """A4, A15: which layers slide, first and last included; the plan repeats what the paper says repeats."""
  counts, segments = WINDOWS[name]
  blocks = registry.card(name).blocks()
  assert collections.Counter(spec.mixer.window for spec in blocks) == counts
  assert [(tuple(b.mixer.window for b in s.specs), s.count) for s in plan.plan(blocks)] == segments


def test_what_the_config_cannot_hide():
  """Published numbers that collected tables have wrong: layers counted in pairs, a scale by head_dim, a lost window."""
  assert registry.card('gemma2-27b').blocks()[0].mixer.scale == 144**-0.5 != 128**-0.5
  assert registry.card('gemma3-27b').blocks()[0].mixer.scale == 168**-0.5 == (5376 / 32) ** -0.5
  assert registry.card('gemma3-4b').blocks()[0].mixer.scale == 256**-0.5
  assert [registry.card(f'gemma2-{size}').layers for size in ('2b', '9b', '27b')] == [26, 42, 46]
  assert registry.card('mistral-7b') == registry.card('mistralai/Mistral-7B-v0.1')
  assert registry.card('mistral-7b').window == 4096 and registry.card('mistral-7b').theta == 10000.0
  assert registry.card('gemma2-9b').final_cap() == 30.0 and registry.card('gemma2-9b').blocks()[1].mixer.cap == 50.0
  assert registry.card('gemma3-1b').final_cap() is None and registry.card('gemma3-1b').blocks()[1].mixer.cap is None
  local, full = registry.card('olmo3-7b').blocks()[2:4]
  assert local.mixer.rope.scaling is None and full.mixer.rope.scaling == YARN
  local, full = registry.card('gemma3-4b').blocks()[4:6]
  assert local.mixer.rope == rope.Spec(256, 10000.0)
  assert full.mixer.rope == rope.Spec(256, 1000000.0, rope.Linear(8.0))
  for name in ('gemma-2b', 'gemma2-2b', 'gemma3-1b'):
    found = registry.card(name)
    assert found.embed_scale() == found.d_model**0.5 and found.final_norm().offset == 1.0
    found.d_model = 1024
    assert found.embed_scale() == 32.0


MEMORY = {  # name: bytes that a row of n tokens takes while generating, by hand from the published sizes
  'qwen3-30b-a3b': lambda n: 48 * 2 * 4 * 128 * 2 * n,  # k and v of 4 heads in 2 bytes
  'gpt-oss-20b': lambda n: 24 * 2 * 8 * 64 * 2 * n,  # windows keep all
  'deepseek3-671b': lambda n: 61 * (512 + 64) * 2 * n,  # a latent and a rotary key: arXiv 2412.19437, section 2.1.1
  # of 35 layers 15 keep their own: 12 one head of 256, 3 one of 512
  'gemma4-e2b': lambda n: (12 * 256 + 3 * 512) * 2 * 2 * n,
  # 12 layers of attention; 36 with 3 inputs of convolutions and, in float32, a matrix of 128 x 128 for 32 heads
  'qwen3-next-80b-a3b': lambda n: 12 * 2 * 2 * 256 * 2 * n + 36 * (3 * (2 * 16 + 32) * 128 * 2 + 32 * 128 * 128 * 4),
}


@pytest.mark.parametrize('name', MEMORY)
@pytest.mark.parametrize('length', [1, 4096])
def test_memory_while_generating(name, length):
  assert registry.card(name).cache_bytes(length) == MEMORY[name](length)


@pytest.mark.parametrize('name', registry.names())
def test_every_card_counts_operations_and_memory(name):
  """More for more tokens, and at least 2 for every number that a token is multiplied with; in float32 at most twice."""
  c = registry.card(name)
  few, many = 64, min(4096, c.context)
  assert c.forward_flops(many) * few >= c.forward_flops(few) * many >= 2 * c.matmul_parameters() * few * many
  assert 0 < c.cache_bytes(few) <= c.cache_bytes(many) and c.cache_bytes(many) * few <= c.cache_bytes(few) * many
  assert c.cache_bytes(many) < c.cache_bytes(many, 'float32') <= 2 * c.cache_bytes(many)
