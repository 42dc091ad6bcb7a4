"""What a model's makers say of how its tokens are chosen."""

import json
from pathlib import Path

import gguf
import pytest

from motley.daemon.text.tokenizer import TokenizerError
from motley.daemon.text.usual_sampling import usual_sampling, usual_tokens
from motley.protocol.mesh_pb2 import Sampling


def test_what_a_generation_config_says(tmp_path: Path) -> None:
    assert usual_sampling(tmp_path) == Sampling()
    of_qwen = {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(of_qwen))
    assert usual_sampling(tmp_path) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    (tmp_path / "generation_config.json").write_text('{"top_k": -1, "repetition_penalty": 1.05}')
    assert usual_sampling(tmp_path) == Sampling(repetition_penalty=1.05)
    (tmp_path / "generation_config.json").write_text('{"top_k": 50.0}')
    assert usual_sampling(tmp_path) == Sampling(top_k=50)


def test_how_long_an_answer_is_unless_a_request_says(tmp_path: Path) -> None:
    config = tmp_path / "generation_config.json"
    assert usual_tokens(tmp_path) == 0
    for told, tokens in (("{}", 0), ('{"max_new_tokens": null}', 0), ('{"max_new_tokens": 200}', 200)):
        config.write_text(told)
        assert usual_tokens(tmp_path) == tokens
    for wrong in ("0", "true", '"long"', "1.5", "1e99"):
        config.write_text(f'{{"max_new_tokens": {wrong}}}')
        with pytest.raises(TokenizerError, match=r"n_config\.json: max_new_tokens = .* must be a whole number"):
            usual_tokens(tmp_path)
    write_metadata(tmp_path / "model.gguf")
    assert usual_tokens(tmp_path / "model.gguf") == 0


def test_what_a_gguf_file_says(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_metadata(file)
    assert usual_sampling(file) == Sampling()
    write_metadata(file, temp=0.6, top_k=20, top_p=0.95, penalty_repeat=1.05)
    assert usual_sampling(file) == Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    write_metadata(file, top_p=2.0)
    with pytest.raises(TokenizerError, match=r"model\.gguf: general\.sampling\.top_p = 2\.0 must be"):
        usual_sampling(file)


def write_metadata(file: Path, **sampling: float) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in sampling.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "wrong", ['{"temperature": "hot"}', '{"top_p": 2}', '{"top_k": 0.5}', '{"top_k": true}', '{"top_k": NaN}']
)
def test_what_tokens_cannot_be_chosen_by(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(TokenizerError, match=r"n_config\.json: (temperature|top_[pk]) = .* must be a (whole )?number"):
        usual_sampling(tmp_path)
