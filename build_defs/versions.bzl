"""Which versions of a distribution the wheels allow.

The floor is where looking back stopped, the ceiling is where the distribution may change what it promises. The tests run
on what requirements_lock.txt pins, between the two; .ci/run resolves both ends for each system, without running there.
"""

ALLOWED = {
    "absl-py": ">=2.1",
    "einops": ">=0.8",
    "flax": ">=0.12.8,<0.13",
    "grain": ">=0.2.16,<0.3",
    "jax": ">=0.12,<0.13",
    "jinja2": ">=3.1,<4",
    "ml-collections": ">=1.1,<2",
    "numpy": ">=2.1,<3",
    "optax": ">=0.2.6,<0.3",
    "orbax-checkpoint": ">=0.12,<0.13",
    "plotly": ">=6,<8",
    "safetensors": ">=0.5,<0.9",
    "sentencepiece": ">=0.2,<0.3",
    "tensorboardX": ">=2.6,<3",
    "tensorstore": ">=0.1.74",
    "tokenizers": ">=0.21,<0.24",
}
