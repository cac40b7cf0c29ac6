"""Kimi K2 (arXiv 2507.20534) and its successors: the architecture of DeepSeek V3, without groups of experts.

K2.5 and K2.6 are published as image-text models; here is their text part. Numbers are those of each model's published
config.json (`source`): the stretch of positions and eps changed between them.
"""

from maxtext_models import card
from maxtext_models.families import deepseek

KINDS = {'kimi_k2': deepseek.KINDS['deepseek_v3']}
WRAPPERS = {
  'kimi_k25': card.Wrapper(
    architectures=('KimiK25ForConditionalGeneration', 'Kimi_K25ForConditionalGeneration'),
    text='deepseek_v3',
    towers=(r'(model\.)?vision_tower\..*', r'(model\.)?mm_projector\..*'),
  ),
}
from_hf = deepseek.from_hf


def _card(page, *, context=262144, eps=1e-5, factor=64.0, beta_fast=1.0):
  return deepseek.v3(
    f'moonshotai/{page}', vocab=163840, context=context, eps=eps, theta=50000.0, dense_layers=1, heads=64, experts=384,
    groups=1, top_groups=1, route_scale=2.827, factor=factor, beta_fast=beta_fast, mtp=0,
  )  # fmt: skip


CARDS = {
  'kimi-k2-1t': _card('Kimi-K2-Instruct', context=131072, eps=1e-6, factor=32.0),
  'kimi-k2-0905-1t': _card('Kimi-K2-Instruct-0905', eps=1e-6),
  'kimi-k2-thinking-1t': _card('Kimi-K2-Thinking'),
  'kimi-k2.5-1t': _card('Kimi-K2.5', beta_fast=32.0),
  'kimi-k2.6-1t': _card('Kimi-K2.6', beta_fast=32.0),
}
TEXT_PARTS = ('kimi-k2.5-1t', 'kimi-k2.6-1t')
ALIASES = {'kimi-k2-base': 'kimi-k2-1t'}
