"""What a model's makers say of how its tokens are chosen."""

import json
from pathlib import Path

import pytest

from motley.daemon.text.tokenizer import TokenizerError
from motley.daemon.text.usual_sampling import usual_sampling
from motley.protocol.mesh_pb2 import Sampling


def test_what_a_generation_config_says(tmp_path: Path) -> None:
    assert usual_sampling(tmp_path) == Sampling()
    assert usual_sampling(tmp_path / "model.gguf") == Sampling()
    of_qwen = {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(of_qwen))
    assert usual_sampling(tmp_path) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    (tmp_path / "generation_config.json").write_text('{"top_k": -1, "repetition_penalty": 1.05}')
    assert usual_sampling(tmp_path) == Sampling(repetition_penalty=1.05)
    (tmp_path / "generation_config.json").write_text('{"top_k": 50.0}')
    assert usual_sampling(tmp_path) == Sampling(top_k=50)


@pytest.mark.parametrize(
    "wrong", ['{"temperature": "hot"}', '{"top_p": 2}', '{"top_k": 0.5}', '{"top_k": true}', '{"top_k": NaN}']
)
def test_what_tokens_cannot_be_chosen_by(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(TokenizerError, match=r"n_config\.json: (temperature|top_[pk]) = .* must be a (whole )?number"):
        usual_sampling(tmp_path)
