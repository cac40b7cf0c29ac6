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

  if _NAME.value:
    _show(registry.card(_NAME.value))
    return
  print(f'{"name":<24} {"family":<8} {"parameters":>18} {"layers":>6} {"d_model":>8} {"context":>8}')
  for name in registry.names():
    card = registry.card(name)
    family = type(card).__name__
    print(f'{name:<24} {family:<8} {card.parameters():>18,} {card.layers:>6} {card.d_model:>8} {card.context:>8}')
  print('\n--name=NAME shows one; any Hugging Face directory of these families loads without a name')


def _show(card):
  import dataclasses

  from maxtext_layers import plan

  print(
    f'{card.name}: {type(card).__name__}, {card.parameters():,} parameters, '
    f'{card.matmul_parameters():,} of them in matmuls'
  )
  print(f'from {card.source}\n')
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
  program.run(main)


if __name__ == '__main__':
  cli()
