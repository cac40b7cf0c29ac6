"""What is traced of each model: the scan plan of every card, against what the published pages say of the layers."""

import pytest

from maxtext_layers import plan
from maxtext_models import registry

# Letters are the kinds of blocks in the order in which they come, a number says how often. What is not here has layers
# that are all alike. Windows: gemma2 every other layer, gemma3 five of six, olmo3 three of four, gpt-oss every other.
PLANS = {
  'llama4-17b-16e': '(AAAB)12',  # chunks and rotation but for every fourth
  'llama4-17b-128e': '(ABAC)12',  # and every other dense
  'qwen3-next-80b-a3b': '(AAAB)12',  # three delta nets, an attention
  'qwen3.5-0.8b': '(AAAB)6',
  'qwen3.5-2b': '(AAAB)6',
  'qwen3.5-4b': '(AAAB)8',
  'qwen3.5-9b': '(AAAB)8',
  'qwen3.5-27b': '(AAAB)16',
  'qwen3.5-35b-a3b': '(AAAB)10',
  'qwen3.5-122b-a10b': '(AAAB)12',
  'qwen3.5-397b-a17b': '(AAAB)15',
  'gemma2-2b': '(AB)13',
  'gemma2-9b': '(AB)21',
  'gemma2-27b': '(AB)23',
  'gemma3-270m': '(AAAAAB)3',
  'gemma3-1b': '(AAAAAB)4 A2',
  'gemma3-4b': '(AAAAAB)5 A4',
  'gemma3-12b': '(AAAAAB)8',
  'gemma3-27b': '(AAAAAB)10 A2',
  'gemma4-e2b': '(AAAAB)2 A3 C1 D1 (EEEEF)4',  # four of five; the last 20 layers read keys and values of C and D
  'gemma4-e4b': '(AAAAAB)3 A4 C1 D1 (EEEEEF)3',  # five of six; the last 18 likewise
  'gemma4-26b': '(AAAAAB)5',
  'gemma4-31b': '(AAAAAB)10',
  'olmo3-7b': '(AAAB)8',
  'olmo3-7b-pt': '(AAAB)8',
  'olmo3-32b': '(AAAB)16',
  'gpt-oss-20b': '(AB)12',
  'gpt-oss-120b': '(AB)18',
  'envy-switch-base': '(AB)6',  # every other layer with experts
  'envy-switch-large': '(AB)12',
  'envy-switch-xxl': '(AB)12',
  'deepseek2-16b': 'A1 B26',  # the first layers dense
  'deepseek2-236b': 'A1 B59',
  'deepseek3-671b': 'A3 B58',
  'deepseek3.1-671b': 'A3 B58',
  'deepseek-r1-671b': 'A3 B58',
  'deepseek3.2-671b': 'A3 B58',
  'deepseek4-284b': 'A2 B1 (CD)20',  # the first two compress nothing, then by 4, and by 128 and 4 in turn
  'kimi-k2-1t': 'A1 B60',
  'kimi-k2-0905-1t': 'A1 B60',
  'kimi-k2-thinking-1t': 'A1 B60',
  'kimi-k2.5-1t': 'A1 B60',
  'kimi-k2.6-1t': 'A1 B60',
}
TRACED = 15  # blocks, at most


def written(segments):
  """The plan as in PLANS."""
  letters: dict = {}
  name = lambda spec: letters.setdefault(spec, chr(ord('A') + len(letters)))
  words = [''.join(map(name, s.specs)) for s in segments]
  return ' '.join((w if len(w) == 1 else f'({w})') + str(s.count) for w, s in zip(words, segments, strict=True))


@pytest.mark.parametrize('name', registry.names())
def test_scan_plan(name):
  """A model is as its page says, at most 15 of its blocks are traced, and laid out they are its layers, in order."""
  card = registry.card(name)
  blocks, segments = card.blocks(), plan.plan(card.blocks())
  base = name.removesuffix('-instruct')
  assert written(segments) == PLANS.get(name, PLANS.get(base, f'A{card.layers}'))
  assert sum(len(s.specs) for s in segments) + len(card.ahead()) <= TRACED
  assert [spec for s in segments for spec in s.specs * s.count] == list(blocks) and len(blocks) == card.layers
  unrolled = plan.plan(blocks, False)
  assert [spec for s in unrolled for spec in s.specs * s.count] == list(blocks) and len(unrolled) == card.layers


def test_the_table_has_no_other_names():
  assert not PLANS.keys() - set(registry.names())
