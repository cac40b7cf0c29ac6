"""Which models are known by name, and what one is.

python -m maxtext_models.models
python -m maxtext_models.models --name=qwen3-0.6b
"""

from absl import flags

from maxtext_models import program

_NAME = flags.DEFINE_string('name', None, 'Show this model: card, blocks, scan plan.', allow_override=True)


def main(args):
  """Prints."""
  del args
  from maxtext_models import registry

  if _NAME.value is not None:
    _show(registry.card(_NAME.value))
    if line := registry.remark(_NAME.value):
      print(f'\n{line}')
    return
  print(f'{"name":<32} {"family":<10} {"parameters":>18} {"active":>16} {"layers":>6} {"d_model":>8} {"context":>8}')
  for name in registry.names():
    card = registry.card(name)
    print(
      f'{name:<32} {type(card).__name__:<10} {card.parameters():>18,} {card.active_parameters():>16,} '
      f'{card.layers:>6} {card.d_model:>8} {card.context:>8}'
    )
  print('\n--name=NAME shows one; any Hugging Face directory of these families loads without a name')


def _show(card):
  import dataclasses

  from maxtext_layers import plan

  print(
    f'{card.name}: {type(card).__name__}, {card.parameters():,} parameters, a token meets {card.active_parameters():,} '
    f'and is multiplied with {card.matmul_parameters():,}'
  )
  print(f'from {card.source}\n')
  print('a token')
  for length in sorted({min(4096, card.context), card.context}):
    print(
      f'  of {length:,}: {card.forward_flops(length) / length / 1e9:,.2f} GFLOP forward, three times that in training; '
      f'{card.cache_bytes(length) / length:,.0f} bytes of memory while generating, in bfloat16'
    )
  print()
  print('card')
  for field in dataclasses.fields(card):
    if field.name not in ('name', 'source'):
      print(f'  {field.name:<16} {getattr(card, field.name)}')
  segments = plan.plan(card.blocks())
  letters: dict = {}
  for segment in segments:
    for spec in segment.specs:
      letters.setdefault(spec, chr(ord('A') + len(letters)))
  print('\nblocks')
  for spec, letter in letters.items():
    print(f'  {letter}')
    for field in dataclasses.fields(spec):
      print(f'    {field.name:<8} {getattr(spec, field.name)}')
  scan = ' '.join(f'[{"".join(letters[s] for s in segment.specs)}]×{segment.count}' for segment in segments)
  print(f'\nscan plan\n  {scan}')


def cli():
  """The console script."""
  program.run(main, computes=False)


if __name__ == '__main__':
  cli()
