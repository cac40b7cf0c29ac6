from maxtext_models import models
from maxtext_models import registry
from tests import programs

run = programs.fixture(models.main)


def test_the_shelf(run):
  code, out, _ = run()
  rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:-2]}
  assert code == 0 and list(rows) == registry.names()
  assert rows['llama3.1-8b'] == ['Llama', '8,030,261,248', '8,030,261,248', '32', '4096', '131072']
  assert rows['qwen3-0.6b'] == ['Qwen3', '596,049,920', '596,049,920', '28', '1024', '40960']
  assert rows['gpt-oss-20b'][:2] == ['GptOss', '20,914,757,184']


def test_one_model(run):
  """Its card, its blocks and its scan plan."""
  code, out, _ = run('--name=llama3.2-1b')
  assert code == 0
  for words in (
    '1,235,814,400 parameters', 'https://huggingface.co/meta-llama/Llama-3.2-1B', 'factor=32.0',
    'tied             True', 'heads=32, kv_heads=8', '[A]×16',
  ):  # fmt: skip
    assert words in out


def test_one_model_with_experts(run):
  """By hand: 3.04 billion parameters twice and 48 layers of 32 heads of 128 over 2048 keys on average; k and v."""
  code, out, _ = run('--name=qwen3-30b-a3b')
  assert code == 0
  for words in (
    '30,532,122,624 parameters', 'experts=128, top_k=8', '7.69 GFLOP forward', '98,304 bytes of memory', '[A]×48',
  ):  # fmt: skip
    assert words in out


def test_an_empty_name_is_a_wrong_one(run):
  code, out, err = run('--name=')
  assert code == 2 and not out and err.startswith("error: unknown model ''; known: llama2-7b, ")


def test_the_text_part_of_more_says_so(run):
  _, out, _ = run('--name=qwen3-vl-2b')
  assert out.endswith(
    'qwen3-vl-2b: the text model, qwen3-vl-2b; its towers for images, video and sound are not part of it\n'
  )
  assert 'text model' not in run('--name=qwen3-1.7b')[1]


def test_an_unknown_name_gets_the_nearest(run):
  code, out, err = run('--name=smollm2-135')
  assert code == 2 and not out
  assert "unknown model 'smollm2-135'; did you mean 'smollm2-135m'" in err and err.count('\n') == 1
