"""Cards by name: aliases, what is refused, what a config.json must say; coefficients that reach every router."""

import pytest

from maxtext_layers import config
from maxtext_models import registry

# model_type: what its class in transformers 5.24 takes for a field that is not there, where a card has another value
LEFT_OUT = {
  'deepseek_v4': {'rope_parameters': None},  # nothing is stretched
  'qwen2': {'tie_word_embeddings': False},
  'qwen3': {'tie_word_embeddings': False},
  'qwen3_5_text': {'tie_word_embeddings': False, 'mtp_num_hidden_layers': 0},
  'qwen3_5_moe_text': {'mtp_num_hidden_layers': 0},  # files decide, as for the others
  'qwen3_next': {'num_nextn_predict_layers': 0},
  'deepseek_v3': {'num_nextn_predict_layers': 0},
  'deepseek_v32': {'num_nextn_predict_layers': 0},
  'envy_switch': {'tie_word_embeddings': False, 'router_aux_loss_coef': 0.001},  # as for its relatives
  'mixtral': {'router_aux_loss_coef': 0.001},
  'gpt_oss': {'router_aux_loss_coef': 0.001},
  'gemma3_text': {
    'num_attention_heads': 8, 'num_key_value_heads': 4, 'vocab_size': 262208, 'max_position_embeddings': 131072,
  },
  'gemma4_text': {
    'layer_types': [('full' if i % 6 == 5 or i == 34 else 'sliding') + '_attention' for i in range(35)],
    'final_logit_softcapping': None, 'num_kv_shared_layers': 0, 'use_double_wide_mlp': False,
  },
}  # fmt: skip


def test_a_field_that_is_left_out_is_named_or_changes_nothing():
  """A10: of every family and every field, also those of rope_parameters, but for what Hugging Face documents."""
  kinds = {}
  for name in registry.names():
    fields = registry.card(name).hf_config()
    kinds.setdefault((fields['model_type'], *sorted(fields)), fields)
  for fields in kinds.values():
    whole, kind = registry.card_from_hf(fields), fields['model_type']
    for name in fields.keys() - {'architectures'}:
      documented = LEFT_OUT.get(kind, {})
      expected = registry.card_from_hf(fields | {name: documented[name]}) if name in documented else whole
      try:
        assert registry.card_from_hf({k: v for k, v in fields.items() if k != name}) == expected, (kind, name)
      except config.Error as error:
        assert name in str(error) and name not in documented, (kind, name, error)
    rope_fields = fields.get('rope_parameters')
    for name in rope_fields or ():
      left = fields | {'rope_parameters': {k: v for k, v in rope_fields.items() if k != name}}
      try:
        assert registry.card_from_hf(left) == whole, (kind, name)
      except config.Error as error:
        assert name in str(error) or 'rope' in str(error), (kind, name, error)


def test_coefficients_reach_every_router():
  """F2: a term that the card has and a layer lacks would be silently absent."""
  for name in registry.names():
    c = registry.card(name)
    routed = hasattr(c, 'balance_loss')
    if routed:
      c.balance_loss, c.router_z_loss = 0.5, 0.25
    routers = [spec.ffn.router for spec in c.blocks() if hasattr(spec.ffn, 'router')]
    assert bool(routers) == routed, name
    assert all(r.balance.loss > 0 or r.table for r in routers), name  # what is looked up cannot be balanced
    assert all(r.balance.z_loss == 0.25 for r in routers), name


def test_names_as_people_type_them():
  assert registry.card('Qwen/Qwen3-0.6B') == registry.card('qwen3-0.6b')
  assert registry.card('meta-llama/Llama-3.1-8B') == registry.card('llama3.1-8b')
  assert registry.card('SmolLM2-135M-Instruct') == registry.card('smollm2-135m')
  assert registry.card('google/gemma-3-27b-it') == registry.card('gemma3-27b')
  assert registry.card('google/gemma-2-9b-it') == registry.card('gemma-2-9b') == registry.card('gemma2-9b')
  assert registry.card('allenai/Olmo-3-32B-Think') == registry.card('olmo3-32b')
  assert registry.card('Qwen/Qwen2.5-7B-Instruct').context == 32768 != registry.card('qwen2.5-7b').context


def test_a_card_is_the_callers_own():
  registry.card('llama3.1-8b').layers = 1
  assert registry.card('llama3.1-8b').layers == 32


def test_an_unknown_name_gets_the_nearest():
  with pytest.raises(config.Error, match=r"unknown model 'qwen3-0.6'; did you mean 'qwen3-0.6b'"):
    registry.card('qwen3-0.6')


# The names of the public MaxText (src/maxtext/configs/models at commit e591f30): ours of the same name, or another.
SAME = """
  deepseek2-16b deepseek2-236b deepseek3-671b deepseek3.2-671b deepseek4-284b
  envy-switch-base envy-switch-large envy-switch-xxl gemma-2b gemma-7b
  gemma2-27b gemma2-2b gemma2-9b gemma3-12b gemma3-27b gemma3-4b gemma4-26b gemma4-31b gemma4-e2b gemma4-e4b
  gpt-oss-120b gpt-oss-20b gpt3-175b gpt3-22b gpt3-52k gpt3-6b kimi-k2-1t llama2-13b llama2-70b llama2-7b llama3-70b
  llama3-8b llama3.1-405b llama3.1-70b llama3.1-8b llama3.3-70b llama4-17b-128e llama4-17b-16e mixtral-8x22b
  mixtral-8x7b olmo3-32b olmo3-7b-pt olmo3-7b qwen2.5-1.5b qwen2.5-14b qwen2.5-7b qwen3-0.6b qwen3-1.7b-base qwen3-1.7b
  qwen3-14b-base
  qwen3-14b qwen3-235b-a22b qwen3-30b-a3b-base qwen3-30b-a3b qwen3-32b qwen3-4b-base qwen3-4b-thinking-2507 qwen3-4b
  qwen3-8b-base qwen3-8b qwen3-next-80b-a3b qwen3-omni-30b-a3b qwen3-vl-2b qwen3-vl-30b-a3b qwen3-vl-4b qwen3.5-35b-a3b
  qwen3.5-397b-a17b
""".split()
OTHER = {
  'deepseek3-671b-2dfsdp': 'deepseek3-671b',
  'deepseek3-671b-batchsplit': 'deepseek3-671b',
  'llama3-405b': 'llama3.1-405b',
  'mistral-7b': 'mistral-7b-v0.1',
  'qwen3-480b-a35b': 'qwen3-coder-480b-a35b',
}
TRIALS = {
  'deepseek-custom': 'deepseek2-16b',
  'deepseek3-test': 'deepseek3-671b',
  'deepseek3-tiny': 'deepseek3-671b',
  'deepseek4-tiny': 'deepseek4-284b',
  'envy-test': 'envy-switch-base',
  'qwen3-custom-30b-a3b': 'qwen3-30b-a3b',
}


def test_every_name_of_the_public_system_is_known_or_refused():
  """Under its name or as an alias; sizes for trials with the nearest name."""
  assert len({*SAME, *OTHER, *TRIALS}) == 78
  for name in SAME:
    registry.card(name).check()
    assert registry.card(name).name == name
  for name, ours in OTHER.items():
    assert registry.card(name).name == ours
  for name, near in TRIALS.items():
    with pytest.raises(config.Error, match=f"model '{name}' is a size for trials, .* the nearest is '{near}'"):
      registry.card(name)


def test_text_parts_say_so():
  """By hand: what takes images, video or sound beside text, in the public system and on our shelf."""
  whole = [name for name in registry.names() if registry.remark(name)]
  assert set(whole) == {
    'gemma3-4b', 'gemma3-12b', 'gemma3-27b', 'gemma4-e2b', 'gemma4-e4b', 'gemma4-26b', 'gemma4-31b', 'kimi-k2.5-1t',
    'kimi-k2.6-1t', 'qwen3-vl-2b', 'qwen3-vl-4b', 'qwen3-vl-30b-a3b', 'qwen3-omni-30b-a3b',
    *(name for name in registry.names() if name.startswith(('llama4-', 'qwen3.5-'))),
  }  # fmt: skip
  line = registry.remark('Qwen/Qwen3-VL-4B-Instruct')
  assert line.startswith('Qwen/Qwen3-VL-4B-Instruct: the text model, qwen3-vl-4b;') and '\n' not in line
