"""Reference case of DeepSeek V3.2: what make_goldens.py makes it from. Queries choose 40 of up to 200 keys."""

from cases_deepseek import V3
from cases_deepseek import YARN
from cases_deepseek import randomise  # noqa: F401

MARGIN = 2e-5  # of every choice of keys and experts, see make_goldens.least_gap
CASES = {
  'deepseek32': (
    'deepseek32',
    'DeepseekV32',
    dict(
      {k: v for k, v in V3.items() if k != 'first_k_dense_replace'}, rope_parameters=YARN, n_group=5, topk_group=2,
      first_k_dense_replace=1, index_topk=40, index_head_dim=14, index_n_heads=9, pad_token_id=None,
    ),
    1,
    256,
  ),
}  # fmt: skip
