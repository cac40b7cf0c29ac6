"""Each wrong value is refused in one line that names it."""

import pytest

from maxtext_layers import config
from maxtext_train.data import config as data_config


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'source': 'parquet'}, "source='parquet' is not one of text, jsonl"),
    ({'packing': 'document'}, "packing='document' .* did you mean '?documents"),
    ({'source': 'text'}, 'paths is empty; source=text'),
    ({'paths': ('a',)}, 'paths=.* but source=stdlib reads no files'),
    ({'source': 'text', 'paths': 'a.txt'}, "paths='a.txt' is not a tuple"),
    ({'source': 'jsonl', 'paths': ('a',), 'field': ''}, 'field is empty'),
    ({'piece': 10}, 'piece=10 is below'),
    ({'seed': -1}, 'seed=-1'),
    ({'epochs': 2}, 'epochs=2 needs at_end=stop'),
    ({'epochs': 0, 'at_end': 'stop'}, 'epochs=0 is not positive'),
    ({'source': 'synthetic', 'at_end': 'stop'}, 'source=synthetic has no end'),
    ({'holdout': 1.0}, r'holdout=1.0 is not in \[0, 1\)'),
    ({'workers': -1}, 'workers=-1'),
    ({'vocab': 1}, 'vocab=1'),
  ],
)
def test_wrong_values(change, message):
  with pytest.raises(config.Error, match=message):
    data_config.Config(**change).check()


def test_the_default_and_each_choice_pass():
  data_config.Config().check()
  for packing in data_config.Packing:
    for source in data_config.Source:
      paths = ('x',) if source in ('text', 'jsonl') else ()
      data_config.Config(source=source, packing=packing, paths=paths, workers=2).check()
