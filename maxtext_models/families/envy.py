"""Envy-Switch: every second layer a Switch Transformer's (arXiv 2101.03961), one of many experts a token.

A decoder with norms on queries and keys, and a norm before and after each feed-forward layer. Sizes are those of the
public MaxText, which names no weights: no checkpoint of another program is known, and config.json is our own. An
expert's output is weighed by its probability (that paper's equation 2), which the norm behind it takes away again but
for its eps: the router learns from the balance loss.
"""

import dataclasses

from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import residual
from maxtext_models import config_json
from maxtext_models.families import llama
from maxtext_models.families import mixtral
from maxtext_models.families import qwen3
from maxtext_models.families import qwen3_moe

MODEL_TYPE = 'envy_switch'
ARCHITECTURE = 'EnvySwitchForCausalLM'


@config.config
class Envy(mixtral.Mixtral):
  """Numbers of an Envy-Switch; d_ff is that of the layers without experts."""

  theta: float = 500000.0
  step: int = 2  # every so manyth layer has experts

  def check_own(self):
    if self.step < 1:
      raise config.Error(f'step={self.step} is not positive')
    for name in ('attention_bias', 'window', 'scaling'):
      if value := getattr(self, name):
        raise config.Error(f'{name}={value!r} is nothing that an Envy has')

  def blocks(self):
    plain = norm.Spec(self.eps)
    mixer = dataclasses.replace(self.mixer(), qk_norm=plain)
    dense = mlp.Spec(self.d_ff, self.activation)
    experts = self.mixture({}, activation=self.activation)
    around = (residual.pre(plain), residual.sandwich(plain))
    return [block.Spec(mixer, experts if (i + 1) % self.step == 0 else dense, around) for i in range(self.layers)]

  def rows(self):
    kinds = {type(spec.ffn) for spec in self.blocks()}
    return [
      *mixtral.ATTENTION,
      *qwen3.QK_NORM,
      ('layers.{l}.ffn_out', 'model.layers.{l}.post_feedforward_layernorm.weight', 'd -> d'),
      *([] if self.tied else [llama.HEAD]),
      *(qwen3_moe.ROWS if kinds != {mlp.Spec} else []),
      *([row for row in llama.ROWS if '.ffn.' in row[0]] if mlp.Spec in kinds else []),
    ]

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **llama.dense_fields(self),
      'num_experts': self.experts,
      'num_experts_per_tok': self.top_k,
      'moe_intermediate_size': self.d_expert,
      'decoder_sparse_step': self.step,
      'router_aux_loss_coef': self.balance_loss,
    }


def from_hf(source):
  """config.json -> Envy."""
  fields = config_json.Fields(source)
  return Envy(
    **llama.dense(source, head_dim=fields.need('head_dim', int)),
    d_expert=fields.need('moe_intermediate_size', int),
    experts=fields.need('num_experts', int),
    top_k=fields.need('num_experts_per_tok', int),
    step=fields.need('decoder_sparse_step', int),
    balance_loss=mixtral.coefficient(fields),
  )


def _card(layers, d_model, d_ff, heads, kv_heads, experts):
  """The published coefficient of a layer's balance loss is 0.01."""
  return Envy(
    source='https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/models', layers=layers,
    d_model=d_model, d_ff=d_ff, d_expert=d_ff, heads=heads, kv_heads=kv_heads, head_dim=128, vocab=32768, context=4096,
    eps=1e-5, tied=True, experts=experts, top_k=1, balance_loss=0.01 * layers,
  )  # fmt: skip


CARDS = {
  'envy-switch-base': _card(12, 1536, 6144, 12, 12, 128),
  'envy-switch-large': _card(24, 2048, 8192, 16, 16, 128),
  'envy-switch-xxl': _card(24, 8192, 20480, 64, 8, 64),
}
ALIASES: dict[str, str] = {}
