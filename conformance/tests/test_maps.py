"""`conformance maps`: what it reads, what it draws, what it says of an argument that cannot be right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.image import imread

import core_numpy
from conformance.__main__ import main
from conformance.lab.pictures import draw_grid, draw_layer, drawable, shortened
from conformance.maps import encoder_of
from core_numpy.contract.words import Words

ONE = {"vocab": 256, "width": 12, "heads": 6, "layers": 2, "max_length": 64}
PAIR = {"vocab": 10, "width": 8, "heads": 2, "layers": 2, "kind": "encoder_decoder", "positions": "relative"}


def run(model, *arguments):
    return main(["maps", *arguments, "--model", str(model), "--backend", "core_numpy"])


def saved(folder, **fields):
    trainer = core_numpy.Trainer(core_numpy.Transformer(core_numpy.ModelConfig(**fields)), core_numpy.TrainConfig())
    trainer.save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("maps") / "run", **ONE)


@pytest.fixture(scope="module")
def words():
    tokenizers = pytest.importorskip("tokenizers")
    pieces = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: i for i, piece in enumerate(sorted(pieces))}
    merges = [("Ġ", "t"), ("Ã", "©")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def test_each_layer_and_the_grid_are_drawn_and_rows_sum_to_one(checkpoint, tmp_path):
    out, numbers = tmp_path / "maps", tmp_path / "maps.json"
    assert run(checkpoint, "a <b>\n", "--out", str(out), "--json", str(numbers)) == 0
    names = ["layer-0.png", "layer-1.png", "layers-by-heads.png", "maps.html"]
    assert sorted(path.name for path in out.iterdir()) == names
    found = json.loads(numbers.read_text())["stacks"]["decoder"]
    assert found["labels"] == ["a", "␣", "<", "b", ">", "↵"]
    weights = np.array(found["maps"])
    assert weights.shape == (2, 6, 6, 6)
    assert np.allclose(weights.sum(-1), 1.0) and not np.triu(weights, 1).any()
    page = (out / "maps.html").read_text()
    assert "a &lt;b&gt;" in page and page.count("data:image/png") == 3 and "2 layers of 6 heads, 6 tokens" in page


def test_the_grid_has_layers_down_and_heads_across(tmp_path):
    maps = [np.zeros((3, 4, 4)), np.zeros((3, 4, 4))]
    maps[1][2] = 1.0  # black: the last layer's last head
    draw_grid(tmp_path / "grid.png", maps)
    dark = imread(tmp_path / "grid.png")[:, :, :3].sum(-1) < 0.1
    rows, columns = np.nonzero(dark)
    inside = (rows > dark.shape[0] * 0.55) & (columns > dark.shape[1] * 0.45) & (columns < dark.shape[1] * 0.8)
    assert inside.sum() > 0.8 * 150 * 150  # 1.6 inches of 110 dots each way, less the lines
    assert dark[: dark.shape[0] // 2, : dark.shape[1] // 2].mean() < 0.05


def test_a_pretrained_folder_is_read_with_its_tokenizer(words, tmp_path):
    size = words.get_vocab_size()
    config = core_numpy.ModelConfig(**ONE | {"vocab": size, "positions": "learned", "activation": "gelu_tanh"})
    core_numpy.Transformer(config).save_pretrained(tmp_path / "gpt2", family="gpt2")
    assert run(tmp_path / "gpt2", "--tokens", "1 2", "--out", str(tmp_path / "ids")) == 0
    words.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    numbers = tmp_path / "x.json"
    assert run(tmp_path / "gpt2", "a té", "--out", str(tmp_path / "m"), "--json", str(numbers)) == 0
    found = json.loads(numbers.read_text())
    assert found["model"] == "gpt2" and found["stacks"]["decoder"]["labels"] == ["a", "␣t", "é"]


def test_labels_of_pieces_are_what_a_reader_knows(words, tmp_path):
    words.save(str(tmp_path / "tokenizer.json"))
    table = Words(tmp_path)
    ids = [*words.encode("a t\né").ids, words.get_vocab_size()]
    assert table.labels(np.array(ids)) == ["a", "␣t", "↵", "é", str(words.get_vocab_size())]
    lone = words.token_to_id("Ã")  # half of a character: it decodes to nothing a reader knows
    assert table.labels(np.array([lone])) == ["Ã"]


def test_a_blank_that_decoding_drops_stays_on_the_label(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁é": 0, "é": 1}, unk_token="é"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Words(tmp_path).labels(np.array([0, 1])) == ["␣é", "é"]


def test_bytes_are_characters_or_two_digits():
    assert Words().labels(np.array([65, 32, 9, 10, 0, 200])) == ["A", "␣", "⇥", "↵", "00", "c8"]


def test_an_encoder_decoder_shows_both_its_sides(tmp_path):
    model = saved(tmp_path / "run", **PAIR)
    numbers = tmp_path / "x.json"
    arguments = ["--tokens", "1 2 3", "--context", "4 5 6 7", "--out", str(tmp_path / "m"), "--json", str(numbers)]
    assert run(model, *arguments) == 0
    stacks = json.loads(numbers.read_text())["stacks"]
    assert np.array(stacks["encoder"]["maps"]).shape == (2, 2, 4, 4)
    assert np.array(stacks["decoder"]["maps"]).shape == (2, 2, 3, 3)
    assert (np.array(stacks["encoder"]["maps"]) > 0).all()  # an encoder sees the whole of its text
    assert not np.triu(stacks["decoder"]["maps"], 1).any()
    assert stacks["encoder"]["labels"] == ["4", "5", "6", "7"]
    assert len(list((tmp_path / "m").glob("*.png"))) == 6


@pytest.mark.parametrize("share", [False, True])
def test_the_encoder_alone_is_the_encoder_inside(share):
    model = core_numpy.Transformer(core_numpy.ModelConfig(**PAIR, share_embedding=share))
    source = np.array([[4, 5, 6, 7]], np.int32)
    alone = encoder_of(core_numpy, model)
    params, inside = core_numpy.get_params(alone), core_numpy.get_params(model)
    table = "decoder.embedding.weight" if share else "encoder.embedding.weight"
    assert np.array_equal(params["embedding.weight"], inside[table])
    assert all(np.array_equal(value, inside[f"encoder.{n}"]) for n, value in params.items() if n != "embedding.weight")
    assert [layer.shape for layer in alone.attention_maps(source)] == [(1, 2, 4, 4)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "at least one byte"),
        (["x" * 65], "1 to 64 tokens to be drawn readably; it has 65"),
        ([], "there is nothing to read"),
        (["a", "--context", "b"], "--context is an encoder-decoder's source"),
        (["a", "--tokens", "1"], "text or --tokens; got both"),
        (["--tokens", "1 300"], "300"),
    ],
)
def test_what_cannot_be_drawn_is_refused(checkpoint, arguments, said, tmp_path, capsys):
    assert run(checkpoint, *arguments, "--out", str(tmp_path / "m")) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "m").exists()


def test_a_model_that_is_missing_or_needs_a_source_is_named(tmp_path, capsys):
    assert run(tmp_path / "none", "a", "--out", str(tmp_path / "m")) == 2
    assert f"{tmp_path / 'none'} does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "a", "--out", str(tmp_path / "m")) == 2
    said = capsys.readouterr().err
    assert "holds no checkpoint" in said and "a Hugging Face folder would have a config.json" in said
    assert run(saved(tmp_path / "run", **PAIR), "--tokens", "1", "--out", str(tmp_path / "m")) == 2
    assert "give its source too, --context" in capsys.readouterr().err
    assert run(tmp_path / "run", "a", "--context", "b", "--out", str(tmp_path / "m")) == 2
    assert "give the prompt as ids" in capsys.readouterr().err


def test_labels_are_cut_and_what_the_font_lacks_is_a_square():
    assert shortened("a" * 12) == "a" * 12 and shortened("a" * 13) == "a" * 11 + "…"
    assert drawable(["$é␣↵⇥…", "a\u0007", "字"]) == ["$é␣↵⇥…", "a□", "□"]


def test_odd_labels_are_drawn_without_a_warning(tmp_path):
    labels = drawable(["$\\frac$", "\\frac", "字", "␣the", "a" * 30, "_^{"])
    draw_layer(tmp_path / "x.png", np.full((5, 6, 6), 1 / 6), labels, 3)
    assert (tmp_path / "x.png").stat().st_size > 5000
